"""Freed memory that stays with the process is not mapped again page by page."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import threading

import numpy as np

from maxghost.parallel import heap

heap.call("mallopt", heap.ARENA_MAX, 1)


def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  np.ones(100_000_000 // 8)
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measure():
  for change in (lambda: None, heap.keep):
    change()
    faults()
    print(faults())


thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not part of this installation")
def test_kept_memory_is_mapped_once():
  out = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120).stdout
  given_back, kept = map(int, out.split())
  assert given_back > 40 * kept


FIRST = """
import os
import sys

from maxghost import attribute
from maxghost.parallel import heap


def call(function, *arguments):
  print(function, *arguments, "jaxlib" in sys.modules, len(os.listdir("/proc/self/task")) <= os.cpu_count())
  sys.exit()


heap.call = call
attribute.main(["runs/none", "--data", "run", "--index", "none"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the list of threads is not part of this installation")
def test_attribute_has_one_heap_before_libraries_start_their_threads():
  """Those of tensorstore, with heaps of their own, left these to XLA's, which then mapped its memory in every step.
  NumPy's own threads, one for each core, are there before."""
  out = subprocess.run([sys.executable, "-c", FIRST], check=True, capture_output=True, text=True, timeout=120).stdout
  assert out.split() == ["mallopt", "-8", "1", "False", "True"]


def test_another_c_library_is_left_alone():
  from maxghost.parallel import heap

  heap.call("no_such_function_of_any_library", 1)
