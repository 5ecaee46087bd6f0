"""The errors of fedda, and what a site may tell others about them.

    FeddaError
    ├── ConfigError     a setting is unknown, has the wrong type or contradicts another
    │   └── UsageError    an option of the command line cannot be understood
    ├── DataError       a file or folder of a site cannot be used
    ├── ModelError      a model or its weights cannot be built or read
    │   ├── WeightsError  a site has not the frozen weights that the run is made with
    │   └── RefineError   a target's images or models leave the last step nothing to learn from
    ├── WireError       an array or number may not leave or enter a process
    ├── NotFiniteError  training diverged
    ├── RosterError     the sites that joined cannot form a run
    ├── QuorumError     too few sites answered
    ├── KeyFileError    a key or certificate is missing, expired or not registered
    ├── ExchangeError   the exchange of gradients was refused, or ended early
    ├── SecureError     a secure sum would not protect this site, or did not come about
    ├── LostError       a site lost its own state of a training, which nobody else has
    ├── ForgottenError  a site no longer has a model that a request only names
    ├── PolicyError     the site's policy does not allow what was asked
    │   └── BatchError    its steps would be over fewer images than the site allows
    ├── BudgetError     a budget of the site's policy is spent
    ├── DiskError       a disk is full, or a file in use cannot be read or written
    └── RunError        a run, a checkpoint or a server process cannot go on

Every message says what was found, what is needed and what to do. Messages may quote a site's file
names or data, so they stay at the site. Only the error's `Code` crosses the wire, and the server
puts it into words by `Code.public`.
"""

import errno
import shlex
from enum import IntEnum

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # there is no room to write more


class Code(IntEnum):
    """All that a site tells others about a failure; the numbers travel as Flower's error codes."""

    INTERNAL = 1000
    CONFIG = 1001
    DATA = 1002
    MODEL = 1003
    WIRE = 1004
    EXPIRED = 1005
    MEMORY = 1006
    NOT_FINITE = 1007
    EXCHANGE = 1008
    LOST = 1009
    POLICY = 1010
    BUDGET = 1011
    RESTARTED = 1012
    FORGOTTEN = 1013
    WEIGHTS = 1014
    SECURE = 1015
    BATCH = 1016
    ORIGIN = 1017
    DISK = 1018
    FEW = 1019

    @property
    def public(self) -> str:
        """A fixed sentence for the operator, which contains nothing of the site's data."""
        return _PUBLIC[self]


_PUBLIC = {
    Code.INTERNAL: "the site's program failed; the full text is in the site's own log",
    Code.CONFIG: "the site refused the run's settings; the full text is in the site's own log",
    Code.DATA: "the site could not use its data; the full text is in the site's own log",
    Code.MODEL: "the site could not build the model; the full text is in the site's own log",
    Code.WIRE: "the site refused to send or accept something the method's contract does not list",
    Code.EXPIRED: "the request was too old when the site came to it",
    Code.MEMORY: "the site ran out of memory",
    Code.NOT_FINITE: "the site's training gave values that are not finite: it diverges; lower "
    "train.lr",
    Code.EXCHANGE: "the exchange of gradients ended early; the full text is in the site's own log",
    Code.LOST: "the site lost its own state of this training; restart its client with the same "
    "--state-dir as before, or begin the run anew",
    Code.RESTARTED: "the site's program was restarted before it had answered",
    Code.WEIGHTS: "the site does not have the server's frozen weights; the full text is in the "
    "site's own log",
    Code.FORGOTTEN: "the site no longer has the model that it was sent before",
    Code.SECURE: "the site refused to take part in this secure sum; the full text is in the site's "
    "own log",
    Code.POLICY: "the site's own policy does not allow this request; ask the site's operator",
    Code.BATCH: "the site takes no step over as few images as train.batch-size; raise it (the "
    "default suits a site's default --min-images), or ask the site's operator",
    Code.ORIGIN: "the site was sent a model that does not come from a first one that it knows; a "
    "run with --start-from, or with weights of a file, needs the same file at the site",
    Code.DISK: "the site's disk is full, or a file that it needs cannot be used; its own log names "
    "it, its operator mends that, and the site goes on",
    Code.FEW: "what the site answers would be about few of its images: training has failed, some "
    "differ much from all others, as of a rare class, or the model was made to read images",
    Code.BUDGET: "a budget of the site's own policy is spent; ask the site's operator",
}


def typed(*words: object) -> str:
    """A command for a message, as a person may type it: its words are quoted for a shell."""
    return shlex.join(map(str, words))


def reason(error: BaseException) -> str:
    """Why something failed, where the system says it in its words, without a file's name."""
    if isinstance(error, FileExistsError):  # the system's "File exists" sounds as if that were good
        return "a file is there, where a folder is needed"
    return getattr(error, "strerror", None) or str(error)


def public(code: int) -> str:
    """The fixed sentence for an error code; any text that came with the code is ignored."""
    try:
        return Code(code).public
    except ValueError:
        return f"Flower's error {code}: --stock needs run.transport=flower; else see the site's log"


class FeddaError(Exception):
    """Base of all errors that a user of fedda can cause and correct."""

    code = Code.INTERNAL


def code_of(error: BaseException) -> Code:
    """The code for an exception, one of fedda's or any other."""
    if isinstance(error, FeddaError):
        return error.code
    if isinstance(error, OSError) and error.errno in FULL:
        return Code.DISK
    if any(f"(os error {number})" in str(error) for number in FULL):  # as safetensors says it
        return Code.DISK
    # torch reports a full GPU with its own error, which derives from RuntimeError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Code.MEMORY
    return Code.INTERNAL


class ConfigError(FeddaError):
    code = Code.CONFIG


class UsageError(ConfigError):
    pass


class DataError(FeddaError):
    code = Code.DATA


class ModelError(FeddaError):
    code = Code.MODEL


class WeightsError(ModelError):
    code = Code.WEIGHTS


class RefineError(ModelError):
    pass


class WireError(FeddaError):
    code = Code.WIRE


class FewImagesError(WireError):
    code = Code.FEW


class NotFiniteError(FeddaError):
    code = Code.NOT_FINITE


class RosterError(FeddaError):
    pass


class QuorumError(FeddaError):
    pass


class KeyFileError(FeddaError):
    pass


class ExchangeError(FeddaError):
    code = Code.EXCHANGE


class SecureError(FeddaError):
    code = Code.SECURE


class LostError(FeddaError):
    code = Code.LOST


class ForgottenError(FeddaError):
    code = Code.FORGOTTEN


class PolicyError(FeddaError):
    code = Code.POLICY


class OriginError(PolicyError):
    code = Code.ORIGIN


class BatchError(PolicyError):
    code = Code.BATCH


class BudgetError(FeddaError):
    code = Code.BUDGET


class DiskError(FeddaError):
    code = Code.DISK


class RunError(FeddaError):
    pass
