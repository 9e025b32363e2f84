"""Headless Chromium, driven over a pipe: pages are loaded, keys pressed, and scripts evaluated in them."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
  """One tab of a browser. A context manager."""

  def __init__(self, profile):
    (reads, write), (read, writes) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (reads, writes)]  # clear of the browser's 3 and 4
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    script = f'exec 3<&{ends[0]} 4>&{ends[1]} {ends[0]}<&- {ends[1]}>&-; exec "$@"'
    command = ["bash", "-c", script, "bash", CHROMIUM, *flags, "--remote-debugging-pipe", "about:blank"]
    quiet = subprocess.DEVNULL
    self._process = subprocess.Popen(command, pass_fds=ends, stdout=quiet, stderr=quiet)
    for fd in (reads, writes, *ends):
      os.close(fd)
    self._write, self._read = os.fdopen(write, "wb", 0), os.fdopen(read, "rb")
    self._numbers, self._rest, self._session = itertools.count(1), b"", None
    self.console: list[str] = []  # what pages complained about

  def __enter__(self):
    page = next(one for one in self("Target.getTargets")["targetInfos"] if one["type"] == "page")
    attached = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log"):
      self(f"{domain}.enable")
    return self

  def __exit__(self, *_):
    self._process.kill()
    self._process.wait()
    self._write.close()
    self._read.close()

  def __call__(self, method, **parameters):
    """The result of a command of the DevTools protocol."""
    number = next(self._numbers)
    message = {"id": number, "method": method, "params": parameters}
    message |= {"sessionId": self._session} if self._session else {}
    self._write.write(json.dumps(message).encode() + b"\0")
    while True:
      got = self._next()
      if got.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
        self.console.append(json.dumps(got["params"]))
      if got.get("id") == number:
        assert "error" not in got, got
        return got["result"]

  def _next(self):
    while b"\0" not in self._rest:
      got = os.read(self._read.fileno(), 1 << 16)
      assert got, "the browser has ended"
      self._rest += got
    message, _, self._rest = self._rest.partition(b"\0")
    return json.loads(message)

  def look(self, expression):
    """The value of a JavaScript expression in the page."""
    got = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in got, got
    return got["result"].get("value")

  def until(self, expression, seconds=20.0):
    end = time.monotonic() + seconds
    while not (value := self.look(expression)):
      assert time.monotonic() < end, f"never: {expression}; {self.console}"
      time.sleep(0.02)
    return value

  def open(self, url, width=1240, height=900, dark=False):
    self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    self("Emulation.setEmulatedMedia", features=scheme)
    self.console.clear()
    self("Page.navigate", url=url)
    self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

  def press(self, key, text=""):
    for kind in ("keyDown", "keyUp"):
      self("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "")

  def write(self, text):
    self("Input.insertText", text=text)

  def picture(self, path):
    path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=False)["data"]))
