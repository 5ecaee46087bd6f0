"""How many files and connections this process may have open."""

import resource

ENOUGH = 2**16
SPARE = 128  # for everything else than connections that strangers open


def connections(most: int) -> int:
    """Allow this process as many open files as the system lets it.

    Args:
        most: connections that are wanted.

    Returns:
        How many connections may be open, so that `SPARE` files are left for everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, min(most, limit - SPARE))
