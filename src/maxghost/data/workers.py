"""What a process that reads or tokenizes data for another one does when it starts."""

import multiprocessing
import os
import threading


def end_with_parent(*_: int) -> None:
  """Ends this worker when its main process was killed; nothing else would. Takes what Grain passes to a worker."""
  parent = multiprocessing.parent_process()
  assert parent is not None, "this is a worker"

  def wait() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()
