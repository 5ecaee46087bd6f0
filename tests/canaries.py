"""Values that are planted in a site's data, and a search for them in whatever left it.

A canary is 16 random bytes. It is looked for as such, as numbers in every floating-point type (as
they are, and scaled to [0, 1] as pixels are), in hexadecimal and base64, and inside streams that
are compressed with zlib or gzip.
"""

import contextlib
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator

import numpy as np

START = 8  # bytes of a needle that are compared first
STREAMS = (b"\x1f\x8b\x08", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def needles(canary: bytes) -> Iterator[bytes]:
    """All forms in which a canary could appear."""
    yield canary
    values = np.frombuffer(canary, np.uint8).astype(np.float64)
    for scaled in (values, values / 255, values.astype(np.float32) / np.float32(255)):
        for kind, count in ((np.float16, 8), (np.float32, 4), (np.float64, 4)):
            for start in range(0, 16, count):
                needle = scaled[start : start + count].astype(kind).tobytes()
                if any(needle[:START]):  # zeros are everywhere, and the other parts remain
                    yield needle
    yield from texts(canary)


def texts(canary: bytes) -> Iterator[bytes]:
    """A canary in hexadecimal, and in base64 as a part of anything longer."""
    yield canary.hex().encode()
    yield canary.hex().upper().encode()
    for before in range(3):
        # The characters at both ends depend on the neighbours.
        found = b64encode(bytes(before) + canary)[4 * (before > 0) : -4]
        yield found[:16]


def found(canaries: Iterable[bytes], places: Iterable[bytes]) -> set[bytes]:
    """Which canaries are in any of the places, in any form, also where it is compressed."""
    forms = {needle: canary for canary in canaries for needle in needles(canary)}
    return {forms[needle] for needle in search(set(forms), b"\n".join(places))}


def search(sought: set[bytes], place: bytes) -> set[bytes]:
    """Which of these byte strings, of 8 or more bytes each, are in a place."""
    by_start: dict[int, list[bytes]] = {}
    for needle in sought:
        by_start.setdefault(int.from_bytes(needle[:START], "little"), []).append(needle)
    starts = np.sort(np.fromiter(by_start, np.uint64, len(by_start)))
    hits = set()
    for data in (place, *inflated(place)):
        for offset in range(min(START, len(data))):
            words = np.frombuffer(data, "<u8", (len(data) - offset) // START, offset)
            spots = np.searchsorted(starts, words)
            spots[spots == len(starts)] = 0
            for word in np.flatnonzero(starts[spots] == words):
                at = offset + START * int(word)
                hits |= {n for n in by_start[int(words[word])] if data.startswith(n, at)}
    return hits


def inflated(data: bytes) -> Iterator[bytes]:
    """What unpacks from the streams that begin anywhere in the data."""
    view = memoryview(data)
    for mark in STREAMS:
        at = data.find(mark)
        while at >= 0:
            with contextlib.suppress(zlib.error):
                unpacked = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(view[at:], 2**24)
                if len(unpacked) >= START:
                    yield unpacked
            at = data.find(mark, at + 1)
