"""What operating systems do differently: locks of files, cores, memory and open files.

Linux and macOS lock by `flock`, Windows by regions of a file; only Linux says which cores a process
may use; Windows tells neither its memory nor its limit of open files in Python's own library.
"""

import os
import sys
import time

REGION = 2**40  # where the byte is that Windows locks: beyond all that is written
PAUSE = 0.05  # seconds between two tries of a lock
ENOUGH = 2**16
SPARE = 128  # for everything else than connections that strangers open


def lock(file: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends.

    Args:
        file: its descriptor.
        shared: several processes may hold this lock at a time, but not beside one that is not
            shared. Windows has none such: there, this lock is held by one process as well.
        wait: for the process that holds it.

    Returns:
        False if another process holds it, and this one was not to wait.
    """
    try:
        import fcntl
    except ImportError:
        return _lock_region(file, wait)
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    return True


def _lock_region(file: int, wait: bool) -> bool:
    """The same on Windows, whose locks keep even their own holder's other handles from reading."""
    import msvcrt

    locking, once = (getattr(msvcrt, name) for name in ("locking", "LK_NBLCK"))
    position = os.lseek(file, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(file, REGION, os.SEEK_SET)
            try:
                locking(file, once, 1)
            except OSError:
                if not wait:
                    return False
                time.sleep(PAUSE)
            else:
                return True
    finally:
        os.lseek(file, position, os.SEEK_SET)


def cores() -> int:
    """How many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def memory() -> int:
    """Bytes of memory of this machine; more than any has where the system does not say."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def connections(most: int) -> int:
    """Allow this process as many open files as the system lets it.

    Returns:
        How many connections may be open, so that `SPARE` files are left for everything else.
    """
    try:
        import resource
    except ImportError:  # Windows bounds no process's sockets
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, min(most, limit - SPARE))
