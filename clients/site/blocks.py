"""The blocks into which a site divides its training images, once and for good.

Whatever a server may see of a round is computed from whole blocks. It chooses the seed, the batch
size and the share of each round. If it could choose the images, too, two rounds over all but one of
the same images would reveal this one. A block is drawn by chance that no server knows, and depends
on no run, seed, method or shape of images. The division is kept in the site's state directory.

    block    the least that a model is trained on: `min-images` images or more
    group    whole blocks, the least that a gradient is summed over: `min-examples` images or more

Images that are added later wait until they fill blocks of their own. If an image is removed, the
others of its block wait until it is back, as a block with one image less would reveal this image.
If the site raises its limits, blocks are joined; if it lowers them, blocks stay as they are.
"""

import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedda.errors import DataError, reason
from fedda.files import keeping
from fedda.train import generator, joined

logger = logging.getLogger("fedda.site")

FILE = "blocks.json"
SECRET = "chance"

T = TypeVar("T")
K = TypeVar("K")
Table = dict[str, tuple[int, int | None]]  # image, by its digest -> its block, and that one's group


@dataclass(frozen=True)
class Blocks:
    """How a site's training images are divided.

    Attributes:
        used: (n,) indices of the images that are in whole blocks, ascending.
        blocks: positions in `used`, one tensor per block.
        groups: positions in `used`, one tensor per group.
    """

    used: Tensor
    blocks: list[Tensor]
    groups: list[Tensor]


def fixed(name: str, images: Sequence[bytes], least: int, together: int) -> Blocks:
    """Divide images by the site's name alone, so that a run can be repeated exactly.

    For experiments: whoever has the images can find out how they are divided. The arguments are
    those of `kept`.
    """
    digests = _digests(images, b"")
    table: Table = {}
    draws = generator("blocks", name)
    divide(table, digests, least, together, lambda n: torch.randperm(n, generator=draws))
    return blocks_of(table, digests, least, together)


def kept(folder: Path, images: Sequence[bytes], least: int, together: int) -> Blocks:
    """Divide images by chance, or as they have been divided before.

    Args:
        folder: where the division is kept.
        images: digest of each image.
        least: images in a block.
        together: images in a group.

    Raises:
        DataError: the kept division cannot be read.
    """
    path = folder / FILE
    secret, table = _read(path) if path.exists() else (secrets.token_bytes(32), {})
    digests = _digests(images, secret)
    # Not by torch, of whose seeds only 32 bits count on the CPU.
    draws = np.random.default_rng()
    if divide(table, digests, least, together, lambda n: torch.from_numpy(draws.permutation(n))):
        with keeping(path, private=True) as part:
            part.write_text(json.dumps({"secret": secret.hex(), "images": table}))
    found = blocks_of(table, digests, least, together)
    if waiting := len(images) - len(found.used):
        logger.warning(
            "%d images wait: they are fewer new ones than fill a block, or an image of their block "
            "was removed or changed",
            waiting,
        )
    return found


def secret(folder: Path) -> str:
    """What only this site knows, the same after a restart; made when it is first needed."""
    path = folder / SECRET
    try:
        if path.exists():
            return path.read_text()
        made = secrets.token_hex(32)
        with keeping(path, private=True) as part:
            part.write_text(made)
    except OSError as error:
        raise DataError(
            f"{path}, from which this site's random draws begin, cannot be read or written "
            f"({reason(error)}); make room, or let this account write in its folder."
        ) from error
    return made


def divide(
    table: Table, images: Sequence[str], least: int, together: int, order: Callable[[int], Tensor]
) -> bool:
    """Add new images to a table, if they fill a block -> whether the table has changed."""
    new = [image for image in images if image not in table]
    if len(new) < least:
        return False
    first = 1 + max((block for block, _ in table.values()), default=-1)
    for number, part in enumerate(order(len(new)).tensor_split(len(new) // least), first):
        table |= {new[i]: (number, None) for i in part.tolist()}
    _group(table, together)
    return True


def _group(table: Table, together: int) -> None:
    """Join blocks that are in no group to groups, if they fill one."""
    loose = _members((image, block) for image, (block, group) in table.items() if group is None)
    if sum(map(len, loose.values())) < together:
        return
    first = 1 + max((g for _, g in table.values() if g is not None), default=-1)
    places = [torch.full((len(members),), block) for block, members in loose.items()]
    for number, blocks in enumerate(joined(places, together), first):
        for block in blocks.unique().tolist():
            table |= {image: (block, number) for image in loose[block]}


def blocks_of(table: Table, images: Sequence[str], least: int, together: int) -> Blocks:
    """Find the whole blocks and groups of a site's present images."""
    present = set(images)
    broken = {block for image, (block, _) in table.items() if image not in present}
    spoilt = {group for _, (block, group) in table.items() if block in broken}
    places = [table.get(image) for image in images]
    used = [i for i, place in enumerate(places) if place and place[0] not in broken]
    chosen = [table[images[i]] for i in used]
    blocks = _members((i, block) for i, (block, _) in enumerate(chosen))
    groups = _members(
        (i, group) for i, (_, group) in enumerate(chosen) if group not in spoilt | {None}
    )
    return Blocks(
        torch.tensor(used, dtype=torch.int64),
        [b for b in joined(_tensors(blocks), least) if len(b) >= least],
        [g for g in joined(_tensors(groups), together) if len(g) >= together],
    )


def _members(pairs: Iterable[tuple[T, K]]) -> dict[K, list[T]]:
    """Collect things by their block or group, the first block first."""
    members: dict[K, list[T]] = {}
    for one, place in pairs:
        members.setdefault(place, []).append(one)
    return members


def _tensors(members: Mapping[Any, list[int]]) -> list[Tensor]:
    return [torch.tensor(members[k]) for k in sorted(members)]


def _digests(images: Sequence[bytes], secret: bytes) -> list[str]:
    """Digests with the site's own key, by which others cannot recognise an image.

    Of equal images each gets a digest of its own.
    """
    seen: Counter[bytes] = Counter()
    found = []
    for image in images:
        one = hashlib.blake2b(
            image, key=secret, salt=seen[image].to_bytes(8, "big"), digest_size=16
        )
        found.append(one.hexdigest())
        seen[image] += 1
    return found


def _read(path: Path) -> tuple[bytes, Table]:
    try:
        content = json.loads(path.read_text())
        table = {image: (int(b), g) for image, (b, g) in content["images"].items()}
        return bytes.fromhex(content["secret"]), table
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, which says how this site's images are divided into blocks, cannot be read "
            f"({reason(error)}); restore it, or delete it if no model of this site was sent before."
        ) from error
