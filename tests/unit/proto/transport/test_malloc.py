"""The tuning of malloc: for good in a process, so each case has a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PREAMBLE = """
import ctypes, logging, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s", level="INFO")
from headrace.transport.malloc import keep_freed_pages

def faults(num_blocks=64, num_bytes=1 << 20):
    "Pages that had to be touched for the first time, for blocks as Flight receives into."
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(num_bytes) for _ in range(num_blocks)]
    for block in blocks:
        ctypes.memset(block, 1, num_bytes)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is tuned")


def run(code: str, **environment: str) -> list[str]:
    """Lines that a process prints."""
    env = {name: value for name, value in os.environ.items() if name != "HEADRACE_KEEP_MALLOC"} | environment
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_memory_of_parts_that_are_gone_is_used_for_the_next_ones() -> None:
    lines = run("print(keep_freed_pages(), keep_freed_pages()); print(faults() > 10_000, faults() < 100, faults() < 100)")
    assert lines[0].startswith("malloc keeps freed pages for later use; HEADRACE_KEEP_MALLOC=1 leaves it alone")
    assert lines[1:] == ["True True", "True True True"], "said once; the first time costs 256 pages a block, then none"


def test_the_user_may_forbid_it() -> None:
    lines = run("print(keep_freed_pages()); faults(); print(faults() > 10_000)", HEADRACE_KEEP_MALLOC="1")
    assert lines == ["malloc is left as it is HEADRACE_KEEP_MALLOC=1", "False", "True"]


def test_it_is_done_only_where_a_part_comes_over_the_network() -> None:
    code = """
from headrace.transport.base import SHARED_MEMORY
from headrace.transport.flight import FlightReceiver
from headrace.trainer.loading.part_client import PartClient
PartClient().close()
print(keep_freed_pages.cache_info().currsize)
FlightReceiver("127.0.0.1:1").close()
print(keep_freed_pages.cache_info().currsize)
"""
    lines = run(code)
    assert (lines[0], lines[-1], len(lines)) == ("0", "1", 3)
