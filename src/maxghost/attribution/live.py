"""The report of a run in training, served on this machine only; the page reloads itself for new scores."""

import contextlib
import http.server
import sys
import threading
from pathlib import Path

from maxghost.attribution import html
from maxghost.attribution.summary import summarize
from maxghost.attribution.texts import Source
from maxghost.config.values import ConfigError, nearest_beside
from maxghost.scorelog.reader import load

ADDRESS = "127.0.0.1"
MOST_REQUESTS = 16  # at once; the others wait
REQUEST_SECONDS = 10  # for one to arrive


class LiveServer(http.server.ThreadingHTTPServer):
  """Serves a run's page on the loopback address; port 0 takes a free one. Raises ConfigError."""

  def __init__(self, run_dir: Path, port: int, num_documents: int, with_texts: bool, accept_lost_rows: bool = False):
    if not run_dir.is_dir():
      raise ConfigError(f"run_dir={run_dir}: no such folder{nearest_beside(run_dir)}")
    self._run_dir, self._num_documents, self._accept = run_dir, num_documents, accept_lost_rows
    self._source = Source(run_dir) if with_texts else None
    self._rendering, self._free = threading.Lock(), threading.BoundedSemaphore(MOST_REQUESTS)
    self._page: tuple[str, str] = ("", "")
    try:
      super().__init__((ADDRESS, port), _Handler)
    except (OSError, OverflowError) as error:
      raise ConfigError(f"--port {port}: cannot be used ({error}); use another, or 0 for any free one") from error

  def process_request(self, request, client_address):
    self._free.acquire()
    super().process_request(request, client_address)

  def process_request_thread(self, request, client_address):
    try:
      super().process_request_thread(request, client_address)
    finally:
      self._free.release()

  def handle_error(self, request, client_address):
    if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # a browser may go away at any time
      super().handle_error(request, client_address)

  def version(self) -> str:
    """Digest of the names, sizes and times of the report's input files; it changes when the run has written."""
    files, known = [*(self._run_dir / "ghost").glob("**/*"), *self._run_dir.glob("*")], []
    for path in sorted(path for path in files if path.suffix in (".npz", ".jsonl")):
      with contextlib.suppress(FileNotFoundError):  # replaced by a longer file this very moment
        status = path.stat()
        known.append((path.name, status.st_size, status.st_mtime_ns))
    return f"{hash(tuple(known)) & (2**64 - 1):016x}"

  def page(self) -> str:
    """The current report; rendered again only when the version has changed."""
    with self._rendering:
      version = self.version()
      if self._page[0] != version:
        try:
          log = load(self._run_dir, accept_lost_rows=self._accept)
          page = html.render(summarize(log, self._num_documents, self._source), version)
        except (ConfigError, OSError) as error:
          stale = self._page[1] if version != self.version() else ""  # it asks again
          page = stale or html.notice("Waiting for scores", str(error), version)
        self._page = (version, page)
      return self._page[1]


class _Handler(http.server.BaseHTTPRequestHandler):
  server: LiveServer
  timeout = REQUEST_SECONDS

  def do_GET(self):
    host = (self.headers.get("Host") or "").partition(":")[0]
    if host not in (ADDRESS, "localhost"):  # a foreign page that points its name at this machine
      self.send_error(403)
    elif self.path == "/":
      self._send("text/html; charset=utf-8", self.server.page())
    elif self.path == "/version":
      self._send("text/plain; charset=utf-8", self.server.version())
    else:
      self.send_error(404)

  def _send(self, kind: str, text: str):
    body = text.encode("utf-8")
    self.send_response(200)
    for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, format, *args):
    """Requests are not printed."""


def serve(server: http.server.HTTPServer) -> None:
  """Serves the live report until Ctrl-C."""
  print(f"live report: http://{ADDRESS}:{server.server_port}/ (only from this machine; Ctrl-C ends it)", flush=True)
  with server:
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      print("live report ended")
