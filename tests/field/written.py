"""Image files written byte by byte from known values, so that no reader is trusted.

png(values, ...)    PNG 1.2: gray, RGB, palette, with alpha or one transparent colour, 1 to 16 bits
tiff(values, ...)   TIFF 6.0: bits, photometric, extra samples, byte order, compression, predictor
"""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # PNG's colour types
NONE, LZW, DEFLATE, PACKBITS = 1, 5, 8, 32773  # TIFF's compressions


def packed(rows: np.ndarray, bits: int, order: str = ">") -> list[bytes]:
    """Samples (H, n) as the bytes of each row: below 8 bits several to a byte, the first high."""
    if rows.dtype.itemsize * 8 == bits:
        return [row.astype(row.dtype.newbyteorder(order)).tobytes() for row in rows]
    texts = ("".join(f"{int(v):0{bits}b}" for v in row) for row in rows)
    return [int(t.ljust(-len(t) // 8 * -8, "0"), 2).to_bytes(-(len(t) // -8), "big") for t in texts]


def png(
    values: np.ndarray,
    bits: int,
    colour: int,
    palette: Sequence[Sequence[int]] = (),
    transparent: bytes = b"",
) -> bytes:
    """A PNG file of samples (H, W) or (H, W, C)."""

    def part(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    height, width = values.shape[:2]
    rows = packed(values.reshape(height, -1), bits)
    made = part(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    made += part(b"PLTE", bytes(v for entry in palette for v in entry)) if len(palette) else b""
    made += part(b"tRNS", transparent) if transparent else b""
    made += part(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + made + part(b"IEND", b"")


def tiff(
    values: np.ndarray,
    bits: int,
    photometric: int,
    order: str = "<",
    compression: int = NONE,
    predictor: int = 1,
    kind: int = 1,
    extra: int | None = None,
    planar: int = 1,
    orientation: int = 1,
    palette: np.ndarray | None = None,
) -> bytes:
    """A TIFF file of samples (H, W) or (H, W, C).

    Args:
        values: the samples, of a type that has `bits` bits where these are 8 or more.
        bits: of a sample.
        photometric: 0 WhiteIsZero, 1 BlackIsZero, 2 RGB, 3 palette, 5 separated, 6 YCbCr, 8 CIELab.
        order: "<" or ">", of the bytes.
        compression: as the format numbers it.
        predictor: 2 stores differences to the sample on the left.
        kind: 1 unsigned, 2 signed, 3 float.
        extra: what the last sample is: 0 unspecified, 1 or 2 alpha, premultiplied or not.
        planar: 1 all samples of a pixel together, 2 one plane after the other.
        orientation: as the format numbers it.
        palette: uint16 (3, 2**bits).
    """
    height, width = values.shape[:2]
    samples = values.reshape(height, width, -1)
    count = samples.shape[2]
    if predictor == 2:
        samples = samples.copy()
        samples[:, 1:] = samples[:, 1:] - samples[:, :-1]
    planes = [samples] if planar == 1 else [samples[..., i : i + 1] for i in range(count)]
    strips = []
    for plane in planes:
        rows = packed(plane.reshape(height, -1), bits, order)
        strips.append(_compressed(rows, compression))
    tags: dict[int, tuple[int, list[int]]] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits] * count),
        259: (3, [compression]),
        262: (3, [photometric]),
        273: (4, [0] * len(strips)),
        274: (3, [orientation]),
        277: (3, [count]),
        278: (4, [height]),
        279: (4, [len(strip) for strip in strips]),
        284: (3, [planar]),
        317: (3, [predictor]),
        339: (3, [kind] * count),
    }
    if palette is not None:
        tags[320] = (3, palette.ravel().tolist())
    if extra is not None:
        tags[338] = (3, [extra])
    return _file(tags, strips, order)


def _file(tags: dict[int, tuple[int, list[int]]], strips: list[bytes], order: str) -> bytes:
    start = 8 + 2 + 12 * len(tags) + 4
    outside = sum(
        -(len(v) * (2 if k == 3 else 4) // -4) * 4 for k, v in tags.values() if len(v) > 1
    )
    places, place = [], start + outside
    for strip in strips:
        places.append(place)
        place += len(strip)
    tags[273] = (4, places)
    entries, more = b"", b""
    for tag, (kind, numbers) in sorted(tags.items()):
        content = struct.pack(f"{order}{len(numbers)}{'H' if kind == 3 else 'I'}", *numbers)
        entries += struct.pack(f"{order}HHI", tag, kind, len(numbers))
        if len(content) > 4:
            entries += struct.pack(f"{order}I", start + len(more))
            more += content.ljust(-(len(content) // -4) * 4, b"\0")
        else:
            entries += content.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    body = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return head + body + more.ljust(outside, b"\0") + b"".join(strips)


def _compressed(rows: list[bytes], compression: int) -> bytes:
    if compression == DEFLATE:
        return zlib.compress(b"".join(rows))
    if compression == PACKBITS:  # literals only, which the format allows; no run crosses a row
        parts = (row[i : i + 128] for row in rows for i in range(0, len(row), 128))
        return b"".join(bytes([len(part) - 1]) + part for part in parts)
    if compression == LZW:
        return _lzw(b"".join(rows))
    return b"".join(rows)


def _lzw(content: bytes) -> bytes:
    """Codes of 9 bits: each byte by itself, the table cleared before they would need 10."""
    codes = []
    for i, byte in enumerate(content):
        codes += [256] * (i % 200 == 0) + [byte]
    text = "".join(f"{code:09b}" for code in [*codes, 257])
    return int(text.ljust(-(len(text) // -8) * 8, "0"), 2).to_bytes(-(len(text) // -8), "big")
