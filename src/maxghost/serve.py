"""`maxghost serve MODEL`: answers OpenAI's API over HTTP, and shows a page on which answers have their sources.

MODEL is a run, a checkpoint of it, a checkpoint of another layout, an imported folder or a Hugging Face folder.
"""

import argparse
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from maxghost.config import Config, ConfigError
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded

EXAMPLES = """\
examples:
  maxghost serve runs/base
  maxghost serve models/smollm2 --port 8000 --slots 16 --cache 4096
  MAXGHOST_API_KEY=$(cat key) maxghost serve runs/base --host 0.0.0.0
"""
KEY = "MAXGHOST_API_KEY"
LEAST_CACHE = 2048  # positions, where the model has them
STOP_SECONDS = 5  # for answers to leave behind the time of --grace


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The command line. Raises ConfigError."""
  parser = Parser("maxghost serve", description=__doc__, epilog=EXAMPLES)
  add = parser.add_argument
  add("model", metavar="MODEL", help="run, checkpoint, imported folder, or Hugging Face folder")
  add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; others than this need a key")
  add("--port", type=int, default=8000, metavar="N", help="port; 0 = any free one (8000)")
  add("--api-key", default="", metavar="KEY", help=f"what clients must send: @FILE, or better the variable {KEY}")
  add("--name", default="", help="of the model, for clients (the folder's name)")
  add("--index", type=Path, metavar="FOLDER", help="index of maxghost attribute, for sources (MODEL/index)")
  add("--slots", type=int, default=8, metavar="N", help="requests that are decoded together (8)")
  add("--cache", type=int, default=0, metavar="N", help=f"positions of a slot, prompt and answer ({LEAST_CACHE})")
  add("--queue", type=int, default=64, metavar="N", help="most requests that wait for a slot (64)")
  add("--timeout", type=float, default=600.0, metavar="SECONDS", help="most time of a request (600)")
  add("--grace", type=float, default=30.0, metavar="SECONDS", help="for running requests when the server stops (30)")
  add("--adapter", default="", metavar="FOLDER", help="LoRA adapter to merge in: folder of PEFT, or a run")
  add("--config", metavar="FILE", help="config.yml of a model that has none beside it")
  add("--dtype", choices=("float32", "bfloat16"), help="compute dtype (the configuration's)")
  args = parser.parse(argv)
  least = {"slots": 1, "cache": 0, "queue": 1, "timeout": 1.0, "grace": 0.0, "port": 0}
  if low := [f"--{name} {getattr(args, name)}: at least {most:g}" for name, most in least.items() if not getattr(args, name) >= most]:
    raise ConfigError(*low)
  args.api_key = _key(args.api_key)
  if args.host not in ("127.0.0.1", "localhost", "::1") and not args.api_key:
    raise ConfigError(f"--host {args.host} is reached by others: set the variable {KEY} to a key that clients must send")
  return args


def _key(given: str) -> str:
  if not given:
    return os.environ.get(KEY, "").strip()
  if not given.startswith("@"):
    print(f"maxghost: note: a key in --api-key is seen in the list of processes; {KEY} is not", file=sys.stderr)
    return given
  try:
    return Path(given[1:]).read_text(encoding="utf-8").strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"--api-key {given} cannot be read: {error}") from error


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0 behind Ctrl-C or SIGTERM, or 2 for wrong input."""
  args = parse(argv)
  from maxghost.data.sources.base import import_package

  for package in ("starlette", "uvicorn"):
    import_package(package, "maxghost serve", "serve")
  from maxghost import load_model

  with _listen(args.host, args.port) as listener:
    place, cfg = load_model.find(args.model, args.config, **({"dtype": args.dtype} if args.dtype else {}))
    return _run(args, listener, _open(args, place, cfg))


def _listen(host: str, port: int) -> socket.socket:
  """Reserves the address before the model is loaded. Raises ConfigError."""
  made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    made.bind((host, port))
  except (OSError, OverflowError) as error:
    made.close()
    raise ConfigError(f"--host {host} --port {port}: cannot be used ({error}); use another port, or 0") from error
  return made


def _open(args: argparse.Namespace, place, cfg: Config):
  """Loads the model and compiles what requests need."""
  from maxghost import load_model
  from maxghost.data.conversations import Rendering
  from maxghost.serving import Batcher, Engine
  from maxghost.serving.requests import Served
  from maxghost.serving.samples import encode

  def say(line: str) -> None:
    print(line, file=sys.stderr)

  most = cfg.model.trainable_position_size if cfg.model.trainable_position_size > 0 else sys.maxsize
  size = args.cache or min(max(LEAST_CACHE, cfg.data.max_target_length), most)
  if size > most:
    raise ConfigError(f"--cache {size}: the model has {most} positions")
  tokenizer, stop_ids = load_model.reading(place, cfg)
  encode([" "], tokenizer, cfg)  # whether tokenizer and model belong together
  rendering, no_chat = None, ""
  try:
    made = Rendering.of(cfg.data, tokenizer)
    rendering, stop_ids = made, stop_ids | made.end_ids()
  except ValueError as error:
    say(f"no chat completions: {(no_chat := str(error))}")
  graphdef, state = load_model.load(place, cfg, say, args.adapter)
  engine = Engine(graphdef, slots=args.slots, cache_size=size)
  batcher = Batcher(engine, engine.load_params(state), tokenizer, stop_ids=sorted(stop_ids), queue_limit=args.queue)
  say("compiling")
  batcher.warm_up()
  find, without = _sources(args, place)
  return Served(
    args.name or Path(args.model).resolve().name, batcher, tokenizer, lambda text: encode([text], tokenizer, cfg)[0],
    size, cfg.model.vocab_size, rendering, no_chat, find, without,
    chats=rendering is not None and (rendering.template is not None or cfg.records == "conversations"),
  )  # fmt: skip


def _sources(args: argparse.Namespace, place) -> tuple[Any, str]:
  folder = args.index or Path(args.model) / "index"
  if args.index is None and not folder.is_dir():
    return None, f"no index of training documents: maxghost attribute {args.model} --data NAME=GLOB --index {folder}"
  from maxghost.attribution.sources import Sources

  return Sources(Path(args.model), folder).of_answer, ""


def _run(args: argparse.Namespace, listener: socket.socket, served) -> int:
  import uvicorn

  from maxghost.serving.http import Server

  class Serving(uvicorn.Server):
    """Says where it serves; when it is stopped, jobs that do not end within the grace are cancelled."""

    async def startup(self, sockets=None):
      await super().startup(sockets)
      host, port = listener.getsockname()[:2]
      print(f"serving {served.name}: http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends it)", flush=True)

    def handle_exit(self, sig, frame):
      super().handle_exit(sig, frame)
      threading.Thread(target=served.batcher.close, args=(args.grace,), daemon=True).start()

  app = Server(served, api_key=args.api_key, seconds=args.timeout, threads=args.queue + args.slots + 1).app
  server = Serving(
    uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
                   timeout_keep_alive=30, timeout_graceful_shutdown=int(args.grace) + STOP_SECONDS)
  )  # fmt: skip
  for number in (signal.SIGINT, signal.SIGTERM):  # also before uvicorn begins to listen to them, and behind it
    signal.signal(number, server.handle_exit)
  server.run(sockets=[listener])
  served.batcher.close(0)
  print("stopped", file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main())
