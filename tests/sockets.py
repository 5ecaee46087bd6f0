"""A host of exchanges for the tests of this process, and where it is."""

import atexit
import shutil
import tempfile
from pathlib import Path

from fedda.exchange import Host

FOLDER = Path(tempfile.mkdtemp(prefix="fedda-"))
AT = f"unix:{FOLDER}"
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def remote() -> Host:
    """A host that sites reach at `AT`."""
    return Host(FOLDER)
