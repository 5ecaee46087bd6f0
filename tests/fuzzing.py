"""Malformed input, made from valid samples with a seeded generator, and the memory it costs.

mutated   valid bytes with bits flipped, and pieces cut, repeated, swapped or made up
odd       a value that no format wants, of any type that a message may hold
peak      how much a block of code made the memory of this process grow
"""

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

HUGE = (2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 10**10)
TEXTS = ("", "\0", "../../etc/passwd", "x" * 5000, "\ud7ff\u202e", "nan", "[]", "{}", "%s%n", "-1")
TEXTS += ("1e999", "9" * 400, "__class__", "model\n", "/", "*", "[" * 3000)


def mutated(draw: Random, data: bytes, changes: int = 3) -> bytes:
    """Change a sample in one to `changes` places."""
    found = bytearray(data)
    for _ in range(draw.randint(1, changes)):
        at = draw.randrange(len(found) + 1)
        to = min(len(found), at + draw.choice((1, 2, 4, 8, 64, 1024)))
        match draw.randrange(8):
            case 0:  # flip a bit
                if at < len(found):
                    found[at] ^= 1 << draw.randrange(8)
            case 1:  # end early
                del found[at:]
            case 2:  # leave out
                del found[at:to]
            case 3:  # repeat
                found[at:at] = found[at:to]
            case 4:  # swap two pieces
                other = draw.randrange(len(found) + 1)
                piece = bytes(found[at:to])
                found[at:to] = found[other : other + len(piece)]
                found[other : other + len(piece)] = piece
            case 5:  # make up
                found[at:to] = draw.randbytes(to - at)
            case 6:  # a number that claims much
                form = draw.choice(("<I", ">I", "<Q", ">Q"))
                number = draw.choice(HUGE) & (2 ** (8 * struct.calcsize(form)) - 1)
                found[at : at + struct.calcsize(form)] = struct.pack(form, number)
            case 7:  # a digit: texts within the sample claim other numbers
                digits = [i for i, byte in enumerate(found[:4096]) if 48 <= byte < 58]
                if digits:
                    found[draw.choice(digits)] = draw.choice(b"0123456789-e.")
    return bytes(found)


def odd(draw: Random) -> Any:
    """A value that may stand in a record of Flower, but hardly anywhere in ours."""
    number = draw.choice((*HUGE, 0, -1, -(2**63), 1))
    real = draw.choice((float("nan"), float("inf"), -1.0, 1e308, 0.5, -0.0))
    single = draw.choice((number, real, draw.choice(TEXTS), draw.random() < 0.5, b"\xff\0" * 9))
    return [single] * draw.choice((0, 1, 40)) if draw.random() < 0.2 else single


@contextmanager
def peak(megabytes: float) -> Iterator[None]:
    """Check that a block never needs more memory than so much beside what it finds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    yield
    grown = (_status("VmHWM") - before) / 1024
    assert grown < megabytes, f"{grown:.0f} MB more, {megabytes:g} MB are allowed"


def _status(field: str) -> int:
    """A line of this process's memory, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(field)
