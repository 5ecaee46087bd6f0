"""What a site notes of a training for itself: features and a confusion matrix, on its own disk.

Neither may leave a site, so they are written in its state directory, for whoever may look there:

    STATE-DIR/SITE/notes/RUN.METHOD-SEED/
        first.npz        features under the model of the first request
        last.npz         the same images under the model of the last round
        confusion.json   the target's test in the last round
        features.png     both npz files as a picture
        dictionary.npz   what a dictionary makes of the target's features, in the last round

A note is 300 forward passes in the first round and in the last. It changes no bit of the training,
and if it fails the site's log says so and the round goes on. A server may begin any number of runs,
so what is kept has bounds: the notes of the oldest trainings are taken away.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedda.data import Labelled, Unlabelled
from fedda.files import partial_path, replacing
from fedda.models import Model, as_inputs, evaluating
from fedda.train import generator

from . import before_after
from .memory import Site
from .request import Request

logger = logging.getLogger("fedda.site")

FIRST, LAST, CONFUSION, PICTURE = "first.npz", "last.npz", "confusion.json", "features.png"
DICTIONARY = "dictionary.npz"
FILES = (FIRST, LAST, CONFUSION, PICTURE, DICTIONARY)
KEPT, ROOM = 50, 2**30  # trainings, and bytes of them all
MOST = 300  # images
VALUES = 2**23  # of their features: of a very wide model fewer images are noted
CLASSES, LETTERS = 1000, 100  # of a confusion matrix, and of a class's name in the features' files
BATCH = 100
LARGEST = float(np.finfo(np.float16).max)


class Noted(Protocol):
    """A method's client, as far as notes look into it."""

    @property
    def site(self) -> Site: ...

    @property
    def request(self) -> Request: ...

    @property
    def trains(self) -> bool: ...

    @property
    def data(self) -> Labelled | Unlabelled: ...

    @property
    def model(self) -> Model: ...

    def keepsakes(self) -> dict[str, np.ndarray]:
        """What a method adds to the notes of the last round."""
        ...


def received(client: Noted) -> float:
    """Note a training request's model, before it is trained -> the seconds this took."""
    start = time.perf_counter()
    if client.site.notes and client.request.comes_first:
        with _harmless(client):
            notes = Notes(client)
            notes.take("received", first=True)
    return time.perf_counter() - start


def tested(client: Noted, test: Labelled | None, p: Tensor | None) -> None:
    """Note the model of a test, and what it made of the test images.

    Args:
        client: the target's.
        test: the labelled test images, if there are any.
        p: (N, C) what the model says of them.
    """
    if client.site.notes:
        with _harmless(client):
            notes = Notes(client)
            # Where the target trains, its first request was the training's.
            notes.take("tested", first=not client.trains, test=test)
            if test is not None and p is not None and notes.is_last and p.shape[1] <= CLASSES:
                notes.confusion(test, p)
            if notes.is_last and (kept := client.keepsakes()):
                notes.write_arrays(DICTIONARY, kept)


class Notes:
    """One request's notes of one site."""

    def __init__(self, client: Noted) -> None:
        request, site = client.request, client.site
        task = request.task
        assert site.state_dir is not None
        self.client = client
        self.task = task
        self.round = request.round
        self.is_last = request.round == task.rounds
        self.folder = site.state_dir / site.name / "notes" / task.training

    def take(self, model: str, first: bool, test: Labelled | None = None) -> None:
        """Write the features where this request is one of those to note."""
        # Tried once: on a full disk every round would pay for a note that cannot be kept.
        fresh = self.client.site.noted != self.folder.name and not (self.folder / FIRST).exists()
        begins = first and (self.round == 1 or fresh)
        if not begins and not self.is_last:
            return
        if begins:
            self.client.site.noted = self.folder.name
        if first and self.round == 1:
            for old in (LAST, CONFUSION, PICTURE, DICTIONARY):  # of an earlier run of the same name
                (self.folder / old).unlink(missing_ok=True)
        found = self._found(model, test)
        if begins:
            self.write_arrays(FIRST, found)
        if self.is_last:
            self.write_arrays(LAST, found)
            with replacing(self.folder / PICTURE) as part:
                before_after.draw(self.folder / FIRST, self.folder / LAST, part)
        self._make_room()

    def confusion(self, test: Labelled, p: Tensor) -> None:
        """Count test images by class (row) and by what the model says (column)."""
        size = len(self.task.names)
        cells = test.y * size + p.argmax(dim=1)
        counts = torch.bincount(cells, minlength=size * size).reshape(size, size)
        table = {
            "site": self.client.site.name,
            "run": self.task.run,
            "method": self.task.method,
            "seed": self.task.seed,
            "round": self.round,
            "classes": list(self.task.names),
            "counts": counts.tolist(),
        }
        with replacing(self.folder / CONFUSION) as part:
            part.write_text(json.dumps(table))

    def _found(self, model: str, test: Labelled | None) -> dict[str, Any]:
        data = self.client.data
        most = min(MOST, VALUES // self.client.model.width)
        chosen = self._choose(len(data), "train", most)
        found: dict[str, Any] = {
            "features": self._features(data.x, chosen),
            "images": chosen.numpy(),
            "classes": np.array([name[:LETTERS] for name in self.task.names[:CLASSES]]),
            "round": self.round,
            "model": model,
        }
        # A target's training set has no labels to give; what is known of its classes is its test's.
        if isinstance(data, Labelled):
            found["labels"] = data.y[chosen].numpy()
        if test is not None:
            chosen = self._choose(len(test), "test", most)
            found["test_features"] = self._features(test.x, chosen)
            found["test_labels"] = test.y[chosen].numpy()
        return found

    def _choose(self, n: int, part: str, most: int = MOST) -> Tensor:
        """The same images in every round of every training."""
        order = torch.randperm(n, generator=generator("notes", self.client.site.name, part))
        return order[:most].sort().values

    def _features(self, x: Tensor, chosen: Tensor) -> np.ndarray:
        parts = []
        for indices in chosen.split(BATCH):
            images = as_inputs(x[indices], self.client.site.device)
            parts.append(self.client.model.features(images).float().cpu())
        return torch.cat(parts).clamp(-LARGEST, LARGEST).numpy().astype(np.float16)

    def write_arrays(self, name: str, found: dict[str, Any]) -> None:
        """Write one of the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / name) as part, part.open("wb") as file:
            np.savez(file, **found)

    def _make_room(self) -> None:
        """Take away the oldest trainings' notes beyond the bounds; never another file."""
        others = [f for f in self.folder.parent.iterdir() if f.is_dir() and f != self.folder]
        others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        room = ROOM - _size(self.folder)
        for number, folder in enumerate(others, start=2):
            room -= _size(folder)
            if number > KEPT or room < 0:
                for name in FILES:
                    (folder / name).unlink(missing_ok=True)
                    partial_path(folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # somebody keeps something of their own there
                    folder.rmdir()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextlib.contextmanager
def _harmless(client: Noted) -> Iterator[None]:
    """Leave model and random numbers as they are, and let nothing that goes wrong out."""
    device = client.site.device
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), torch.no_grad(), evaluating(client.model):
            yield
    except Exception as error:  # a full disk, a full GPU: the run is worth more than a note
        logger.warning("the notes of this round are not complete (%s); the round goes on", error)
