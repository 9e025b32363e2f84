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


def test_another_c_library_is_left_alone():
  from maxghost.parallel import heap

  heap.call("no_such_function_of_any_library", 1)
