"""How glibc's malloc keeps memory: by default in a pool per thread, which grow and are not freed.

A run's program takes pieces of models in a thread per site, and holds whole models: with one pool,
and arrays of some megabytes outside of it, memory that was freed goes back. A site works on one
model after another: new memory for each array would cost a third of its processor time.
"""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def one_pool(large: int = 2**22, spare: int = 2**22) -> None:
    """Let malloc use one pool; with glibc only.

    Args:
        large: bytes from which on an array is outside of the pool, and given back once it is freed.
        spare: bytes that the pool keeps at its end for what comes next.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, large)
        libc.mallopt(M_TRIM_THRESHOLD, spare)
        libc.mallopt(M_ARENA_MAX, 1)
