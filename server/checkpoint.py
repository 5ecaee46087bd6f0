"""Write a training's state to disk after every round, completely or not at all, and read it.

    DIR/ROUND.checkpoint.safetensors   the model, and arrays that the strategy remembers
    DIR/checkpoint.json                the round, numbers that the strategy remembers, the rounds
                                       so far, bytes sent, the digest of the other file
    DIR/best.checkpoint.json           the same of the round with the highest infomax, to which a
                                       training goes back that collapses

Every random draw of fedda is a function of (seed, site, round), so no state of a random generator
has to be saved.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from fedda.errors import RunError, WireError, reason
from fedda.files import replacing
from fedda.wire.packing import Arrays, Manifest, Packed, lay_out

UNREADABLE = (OSError, LookupError, TypeError, AttributeError, ValueError, SafetensorError)
UNREADABLE += (WireError, RecursionError)
UNTESTED = "untested"  # in the entry of a round of which no test came back
DTYPES = {  # numpy's names -> those of safetensors
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (32, 64)},
    **{"uint8": "U8", "uint16": "U16", "bool": "BOOL"},
}
ARRAYS, FACTS, BEST = "checkpoint.safetensors", "checkpoint.json", "best.checkpoint.json"


@dataclass
class State:
    """Everything a training needs to go on after its last finished round.

    `arrays` and `numbers` hold what the strategy remembers; each of the arrays has a layout.
    """

    round: int
    model: Arrays
    arrays: dict[str, Packed] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    ledger: list[list] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)


def untested(state: State) -> bool:
    """Whether the last finished round should have been tested, but no test came back."""
    return bool(state.history and state.history[-1].get(UNTESTED))


def write(folder: Path, state: State) -> None:
    """Replace the folder's checkpoint; if writing fails, the previous one stays.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    flat = {f"model/{n}": a for n, a in state.model.items()}
    # By number, as the name of a memory and the names of its arrays may both contain a slash.
    for place, packed in enumerate(state.arrays.values()):
        flat |= {f"memory/{place}/{n}": a for n, a in packed.raw().items()}
    facts = {k: v for k, v in vars(state).items() if k not in ("model", "arrays")}
    facts["layouts"] = {name: packed.manifest.text for name, packed in state.arrays.items()}
    # The arrays are written first, to a file named after their round. The JSON file, replaced last,
    # names that file, so a crash in between leaves the previous checkpoint valid.
    facts["arrays"] = f"{state.round}.{ARRAYS}"
    facts["order"] = list(flat)  # reading gives no order, but the order in a packed model counts
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts["digest"] = _write_arrays(folder / facts["arrays"], flat)
        best = state.best.get("round")
        if best == state.round:
            replace(folder / BEST, json.dumps(facts).encode())
        replace(folder / FACTS, json.dumps(facts).encode())
    except OSError as error:
        former = (
            "the previous one is intact" if os.path.isfile(folder / FACTS) else "it is the first"
        )
        raise RunError(
            f"The checkpoint of round {state.round} cannot be written to {folder} "
            f"({reason(error)}); {former}. Make room and resume the run."
        ) from error
    for old in folder.glob(f"*.{ARRAYS}"):
        if old.name not in (facts["arrays"], f"{best}.{ARRAYS}"):
            old.unlink(missing_ok=True)


def read(folder: Path, name: str = FACTS) -> State | None:
    """Read the folder's checkpoint; None if it has none.

    Args:
        folder: of the training.
        name: FACTS for the last round's, BEST for that of the round with the highest infomax.

    Raises:
        RunError: the checkpoint is damaged.
    """
    if not (folder / name).is_file():
        return None
    try:
        facts = json.loads((folder / name).read_text())
        data = (folder / facts.pop("arrays")).read_bytes()
        if hashlib.sha256(data).hexdigest() != facts.pop("digest"):
            raise ValueError("the digest does not match")
        flat = load(data)
        model: Arrays = {}
        for name in facts.pop("order"):
            part, rest = name.split("/", 1)
            if part == "model":
                model[rest] = flat[name]
        arrays: dict[str, Packed] = {}
        for place, (name, text) in enumerate(facts.pop("layouts").items()):
            layout = Manifest.parse(text)  # in which they were packed before
            of_it = {e.name: flat[f"memory/{place}/{e.name}"] for e in layout.entries}
            arrays[name] = lay_out(layout, of_it)
        absent = {each.name for each in fields(State)} - {"model", "arrays"} - set(facts)
        if absent:
            raise LookupError(f"it lacks {', '.join(sorted(absent))}")
        return State(model=model, arrays=arrays, **facts)
    except UNREADABLE as error:
        raise RunError(
            f"The checkpoint in {folder} cannot be read ({error}); delete the folder to train "
            "from the start, or restore it."
        ) from error


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old content or the new."""
    with replacing(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_arrays(path: Path, flat: Arrays) -> str:
    """Write a safetensors file -> its SHA-256.

    The library's own function copies all arrays twice in memory first; each is here written from
    where it lies. The format: the header's length in 8 bytes, a header in JSON, the arrays.
    """
    order = sorted(flat, key=lambda name: -flat[name].itemsize)  # each begins at its alignment
    header, end = {}, 0
    for name in order:
        begin, end = end, end + flat[name].nbytes
        about = {"dtype": DTYPES[str(flat[name].dtype)], "shape": list(flat[name].shape)}
        header[name] = about | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with replacing(path) as part, part.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *(flat[name] for name in order)):
            if isinstance(piece, np.ndarray):
                piece = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            total.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return total.hexdigest()
