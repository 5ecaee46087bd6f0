"""How glibc's malloc keeps memory: by default in a pool per thread, which grow and are not freed.

A server handles pieces of some megabytes in many threads, so after hundreds of runs each thread's
pool holds several. With one pool, and large pieces outside of it, freed memory goes back.
"""

import contextlib
import ctypes

LARGE = 2**18  # bytes; pieces of this size are freed at once
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def one_pool() -> None:
    """Let malloc use one pool, and give back large pieces at once; with glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.mallopt(M_ARENA_MAX, 1)
