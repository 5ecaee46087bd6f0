"""How glibc's malloc keeps memory: by default in a pool per thread, which grow and are not freed.

A server handles pieces of some megabytes in many threads, so after hundreds of runs each thread's
pool holds several. With one pool, and large arrays outside of it, freed memory goes back.

What is outside of the pool costs the system fresh pages, which it clears, for every copy. So in the
SuperLink, which copies each piece several times, the pieces are inside, and the pool does not give
its end back each time. A run's program copies them less, and holds whole models: there they are
outside.
"""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def one_pool(large: int = 2**23, spare: int = 2**24) -> None:
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
