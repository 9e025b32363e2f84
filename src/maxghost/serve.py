"""`maxghost serve MODEL`: answers OpenAI's API over HTTP, and shows a page on which answers have their sources.

MODEL is a run, a checkpoint of it, a checkpoint of another layout, an imported folder or a Hugging Face folder.
"""

import argparse
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxghost import left_with
from maxghost.config import ConfigError
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded, import_package, printable

KEY = "MAXGHOST_API_KEY"
CACHE = 2048  # positions, where the model has them and was trained on no more


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The command line. Raises ConfigError."""
  example = f"example: {KEY}=$(cat key) maxghost serve runs/base --host 0.0.0.0 --slots 16"
  parser = Parser("maxghost serve", description=__doc__, epilog=example)
  add = parser.add_argument
  add("model", metavar="MODEL", help="run, checkpoint, imported folder, or Hugging Face folder")
  add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (127.0.0.1); others need a key")
  add("--port", type=int, default=8000, metavar="N", help="port; 0 = any free one (8000)")
  add("--api-key", default="", metavar="KEY", help=f"what clients send; better {KEY}, which no list of processes shows")
  add("--name", default="", help="of the model, for clients (the folder's name)")
  add("--index", type=Path, metavar="FOLDER", help="index of maxghost attribute, for sources (MODEL/index)")
  add("--slots", type=int, default=8, metavar="N", help="requests that are decoded together (8)")
  add("--cache", type=int, default=0, metavar="N", help=f"positions of a slot, prompt and answer ({CACHE})")
  add("--queue", type=int, default=64, metavar="N", help="most requests that wait for a slot (64)")
  add("--timeout", type=float, default=600.0, metavar="SECONDS", help="most time of a request (600)")
  add("--grace", type=float, default=30.0, metavar="SECONDS", help="for running requests when the server stops (30)")
  add("--adapter", default="", metavar="FOLDER", help="LoRA adapter to merge in: folder of PEFT, or a run")
  add("--config", metavar="FILE", help="config.yml of a model that has none beside it")
  add("--dtype", choices=("float32", "bfloat16"), help="compute dtype (the configuration's)")
  args = parser.parse(argv)
  parser.check(args, slots=1, cache=32 if args.cache else 0, queue=1, timeout=1, grace=0, port=0)
  args.api_key = args.api_key or os.environ.get(KEY, "").strip()
  if not (args.api_key.isascii() and args.api_key.isprintable()):
    raise ConfigError(f"--api-key or {KEY} has characters that no header can hold; use a key of ASCII characters")
  if args.host not in ("127.0.0.1", "localhost", "::1") and not args.api_key:
    raise ConfigError(f"--host {args.host} is reached by others: set {KEY} to a key that clients must send")
  return args


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0 after Ctrl-C or SIGTERM, or 2 for wrong input."""
  args = parse(argv)
  for package in ("starlette", "uvicorn"):
    import_package(package, "maxghost serve", "serve")
  with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _claim(args, listener.bind, (args.host, args.port))  # before the model is loaded
    return _run(args, listener, _open(args))


def _claim(args: argparse.Namespace, step: Callable[..., None], *given: Any) -> None:
  """Takes a step towards the address. Raises ConfigError if another program has it."""
  try:
    step(*given)
  except (OSError, OverflowError) as error:
    said = f"--host {args.host} --port {args.port}: cannot be used ({error})"
    raise ConfigError(f"{said}; use another port, or 0 for any free one") from error


def _open(args: argparse.Namespace) -> Any:
  """Loads the model and compiles what requests need. Raises ConfigError."""
  from maxghost import generate, load_model

  place, cfg = load_model.find(args.model, args.config, **({"dtype": args.dtype} if args.dtype else {}))
  from maxghost.data.conversations import Rendering
  from maxghost.data.tokenizers import load_tokenizer
  from maxghost.serving import Batcher, Engine
  from maxghost.serving.requests import Served

  say = functools.partial(print, file=sys.stderr)
  most = cfg.model.trainable_position_size if cfg.model.trainable_position_size > 0 else sys.maxsize
  size = args.cache or min(max(CACHE, cfg.data.max_target_length), most)
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  encoded = functools.partial(generate.encoded, chat=False, cfg=cfg, tokenizer=tokenizer)
  stop_ids = encoded(["a"])[1]  # a space alone may have no token
  rendering, no_chat = Rendering.of(cfg.data, tokenizer), ""
  try:
    stop_ids |= rendering.end_ids()
  except ValueError as error:
    rendering, no_chat = None, str(error)
    say(f"no chat completions: {no_chat}")
  chats = rendering is not None and (rendering.template is not None or cfg.records == "conversations")
  layout = load_model.layout_of(cfg)
  graphdef, state = load_model.load(place, cfg, say, args.adapter, layout)
  engine = Engine(graphdef, slots=args.slots, cache_size=size, layout=layout)
  params = engine.load_params(state)
  say("compiling")
  find, without = _sources(args)
  engine.warm_up(params)
  batcher = Batcher(engine, params, tokenizer, stop_ids=sorted(stop_ids), queue_limit=args.queue)
  return Served(
    printable(args.name or Path(args.model).resolve().name), batcher, tokenizer, lambda text: encoded([text])[0][0],
    size, engine.vocab_size, rendering, no_chat, find, without, chats,
  )  # fmt: skip


def _sources(args: argparse.Namespace) -> tuple[Any, str]:
  """(what finds the sources of an answer, why there are none)."""
  from maxghost import ask

  try:
    if args.adapter:
      raise ConfigError("an index belongs to weights without --adapter")
    found = ask.opened(Path(args.model), args.index)
  except ConfigError as error:
    if args.index or ((Path(args.model) / "index").is_dir() and not args.adapter):
      raise
    print(f"no sources: {error}", file=sys.stderr)
    return None, str(error)
  sources = ask.open_sources(*found)
  sources.warm_up()
  return sources.of_answer, ""


def _run(args: argparse.Namespace, listener: socket.socket, served: Any) -> int:
  import uvicorn

  from maxghost.serving.http import Server

  class Serving(uvicorn.Server):
    async def startup(self, sockets=None):
      _claim(args, listener.listen)  # two servers that load their models at once may both have bound it
      await super().startup(sockets)
      at, port = listener.getsockname()[:2]
      print(f"serving {served.name}: http://{f'[{at}]' if ':' in at else at}:{port}/ (Ctrl-C ends it)", flush=True)

    def handle_exit(self, sig, frame):
      """Requests go on for the grace, or until a second signal; then their jobs are cancelled: clients are told."""
      again, self.should_exit = self.should_exit, True
      threading.Thread(target=served.batcher.close, args=(0.0 if again else args.grace,), daemon=True).start()
      if again:
        threading.Timer(1, setattr, (self, "force_exit", True)).start()  # for those who do not read

  app = Server(served, api_key=args.api_key, seconds=args.timeout).app
  options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
  options |= {"server_header": False, "timeout_keep_alive": 30, "timeout_graceful_shutdown": int(args.grace) + 5}
  server = Serving(uvicorn.Config(app, **options))
  for number in (signal.SIGINT, signal.SIGTERM):  # also before and after uvicorn handles them
    signal.signal(number, server.handle_exit)
  server.run(sockets=[listener])
  served.batcher.close()
  print("stopped", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(left_with(main()))
