"""A naive twin of the masked sum: Python's whole numbers, one mask at a time."""

from collections.abc import Mapping, Sequence

MODULUS = 2**64


def encode(values: Sequence[float], weight: int, bits: int, modulus: int = MODULUS) -> list[int]:
    return [round(x * weight * 2.0**bits) % modulus for x in values]


def masked(
    values: Mapping[str, list[int]], masks: Mapping[tuple[str, str], list[int]]
) -> dict[str, list[int]]:
    """What each site sends: masks[a, b] is added by a, and subtracted by b."""
    sent = {site: list(v) for site, v in values.items()}
    for (a, b), mask in masks.items():
        for i, m in enumerate(mask):
            sent[a][i] = (sent[a][i] + m) % MODULUS
            sent[b][i] = (sent[b][i] - m) % MODULUS
    return sent


def mean(sent: Mapping[str, list[int]], bits: int, weight: int) -> list[float]:
    totals = [sum(column) % MODULUS for column in zip(*sent.values(), strict=True)]
    signed = [t - MODULUS if t >= MODULUS // 2 else t for t in totals]
    return [t / 2**bits / weight for t in signed]
