"""`maxghost report RUN_DIR`: the value of the training examples, on the terminal and as RUN_DIR/report.html."""

import argparse
import sys
from pathlib import Path

from maxghost import attribution
from maxghost.attribution import html, live, output, terminal
from maxghost.attribution.summary import summarize
from maxghost.attribution.texts import Source
from maxghost.config.arguments import ACCEPT_HELP, Parser
from maxghost.config.values import guarded
from maxghost.scorelog.reader import run_of


def parse(argv: list[str] | None) -> argparse.Namespace:
  parser = Parser("maxghost report", description=__doc__)
  add = parser.add_argument
  add("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run: <base_output_directory>/<run_name>")
  add("--documents", type=int, default=20, metavar="N", help="best and worst documents on the page (20)")
  add("--output", type=Path, metavar="FILE", help="path of the page (RUN_DIR/report.html)")
  add("--no-texts", action="store_true", help="do not read the corpus to show the documents' texts")
  add("--accept-lost-rows", action="store_true", help=ACCEPT_HELP)
  add("--watch", action="store_true", help="serve the page on this machine and renew it during training")
  add("--port", type=int, default=0, metavar="N", help="with --watch: the port (0 = any free one)")
  args = parser.parse(argv, documents=0, port=0)
  parser.read_together(args, {"watch": ("output",)}, watch=("port",))
  args.run_dir = run_of(args.run_dir)
  return args


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input; nothing has been written then."""
  args = parse(argv)
  if args.watch:
    live.serve(live.LiveServer(args.run_dir, args.port, args.documents, not args.no_texts, args.accept_lost_rows))
    return 0
  source = None if args.no_texts else Source(args.run_dir)
  summary = summarize(attribution.load(args.run_dir, accept_lost_rows=args.accept_lost_rows), args.documents, source)
  path = args.output or args.run_dir / "report.html"
  output.write_output(path, html.render(summary))
  with output.console(pipe_width=None) as console:
    terminal.show(summary, console)
  print(f"\nreport: {path}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
