"""A site's notes about a training: features and a confusion matrix, on the site's own disk.

Neither may leave the site, so they are written to its state directory, for people who may read it:

    STATE-DIR/SITE/notes/RUN.METHOD-SEED/
        first.npz        features under the model of the first request
        last.npz         the same images under the model of the last round
        confusion.json   the target's test in the last round
        features.png     both npz files as a picture
        dictionary.npz   what a dictionary makes of the target's features, in the last round
        refined.npz      the points of the target's last step, with the answers before and after it

A note takes forward passes of 300 images in the first round and in the last. It changes no bit of
the training. If it fails, the site's log says so and the round goes on. A server may begin any
number of runs, so the notes of the oldest trainings are deleted beyond some bounds.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedda.data import Labelled
from fedda.files import keep_newest, keeping, put, replacing
from fedda.models import as_inputs, evaluating
from fedda.refining import Refined
from fedda.train import generator

from . import before_after
from .state import TRAINING
from .trainer import Trainer

logger = logging.getLogger("fedda.site")

FIRST, LAST, CONFUSION, PICTURE = "first.npz", "last.npz", "confusion.json", "features.png"
DICTIONARY, REFINED = "dictionary.npz", "refined.npz"
FILES = (FIRST, LAST, CONFUSION, PICTURE, DICTIONARY, REFINED)
KEPT, ROOM = 50, 2**30  # bounds on all notes: number of trainings, and bytes
MOST = 300  # images in a note
VALUES = 2**23  # values of their features; for a very wide model, fewer images are noted
CLASSES, LETTERS = 1000, 100  # most classes in a note, and letters of a class name
BATCH = 100
LARGEST = float(np.finfo(np.float16).max)


def received(client: Trainer) -> float:
    """Note the model of a training request before it is trained -> the seconds this took."""
    start = time.perf_counter()
    if client.site.notes and client.request.comes_first:
        _harmlessly(client, lambda: Notes(client).take("received", first=True))
    return time.perf_counter() - start


def tested(
    client: Trainer,
    test: Labelled | None,
    p: Tensor | None,
    keepsakes: Callable[[], dict[str, np.ndarray]],
) -> None:
    """Note the model of a test, and its predictions for the test images.

    Args:
        client: the target's client.
        test: the labelled test images, if there are any.
        p: (N, C) the predicted class probabilities of these images.
        keepsakes: returns what the method adds to the notes of the last round.
    """

    def take() -> None:
        notes = Notes(client)
        # If the target trains, its first request was one to train.
        notes.take("tested", first=not client.trains, test=test)
        if test is not None and p is not None and notes.is_last and p.shape[1] <= CLASSES:
            notes.confusion(test, p)
        if notes.is_last and (arrays := keepsakes()):
            notes.write_arrays(DICTIONARY, arrays)

    if client.site.notes:
        _harmlessly(client, take)


def refined(client: Trainer, made: Refined) -> None:
    """Note the target's last step."""
    if client.site.notes:
        _harmlessly(client, lambda: Notes(client).refined(made))


class Notes:
    """The notes of one site about one request."""

    def __init__(self, client: Trainer) -> None:
        request, site = client.request, client.site
        task = request.task
        assert site.state_dir is not None
        self.client = client
        self.task = task
        self.round = request.round
        self.is_last = request.is_last
        self.folder = site.state_dir / site.name / "notes" / task.training

    def take(self, model: str, first: bool, test: Labelled | None = None) -> None:
        """Write the features, if this request is one of those to note."""
        # Tried only once: on a full disk, every round would lose time on a note it cannot keep.
        fresh = self.client.site.noted != self.folder.name and not (self.folder / FIRST).exists()
        begins = first and (self.round == 1 or fresh)
        if not begins and not self.is_last:
            return
        if begins:
            self.client.site.noted = self.folder.name
        if first and self.round == 1:
            for old in FILES[1:]:  # of an earlier run of the same name
                (self.folder / old).unlink(missing_ok=True)
        arrays = self._arrays(model, test)
        if begins:
            self.write_arrays(FIRST, arrays)
        if self.is_last:
            self.write_arrays(LAST, arrays)
            with replacing(self.folder / PICTURE) as part:
                before_after.draw(self.folder / FIRST, self.folder / LAST, part)
        self._make_room()

    def confusion(self, test: Labelled, p: Tensor) -> None:
        """Count test images by class (row) and predicted class (column)."""
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
        put(self.folder / CONFUSION, json.dumps(table))

    def refined(self, made: Refined) -> None:
        """Write the points of some images, with the answers before and after."""
        chosen = self._choose(len(made.points), "train")
        z = made.points[chosen].float().numpy()
        before, after = (p[chosen].argmax(dim=1).numpy() for p in (made.before, made.after))
        self.write_arrays(REFINED, {"points": z, "before": before, "after": after})

    def _arrays(self, model: str, test: Labelled | None) -> dict[str, Any]:
        data = self.client.data
        most = min(MOST, VALUES // self.client.model.width)
        chosen = self._choose(len(data), "train", most)
        arrays: dict[str, Any] = {
            "features": self._features(data.x, chosen),
            "images": chosen.numpy(),
            "classes": np.array([name[:LETTERS] for name in self.task.names[:CLASSES]]),
            "round": self.round,
            "model": model,
        }
        # A target's training images have no labels; only its test images show its classes.
        if isinstance(data, Labelled):
            arrays["labels"] = data.y[chosen].numpy()
        if test is not None:
            chosen = self._choose(len(test), "test", most)
            arrays["test_features"] = self._features(test.x, chosen)
            arrays["test_labels"] = test.y[chosen].numpy()
        return arrays

    def _choose(self, n: int, part: str, most: int = MOST) -> Tensor:
        """Choose images, the same in every round of every training."""
        order = torch.randperm(n, generator=generator("notes", self.client.site.name, part))
        return order[:most].sort().values

    def _features(self, x: Tensor, chosen: Tensor) -> np.ndarray:
        parts = []
        for indices in chosen.split(BATCH):
            images = as_inputs(x[indices], self.client.site.device)
            parts.append(self.client.model.features(images).float().cpu())
        return torch.cat(parts).clamp(-LARGEST, LARGEST).numpy().astype(np.float16)

    def write_arrays(self, name: str, arrays: dict[str, Any]) -> None:
        """Write one of the npz files."""
        with keeping(self.folder / name) as part, part.open("wb") as file:
            np.savez(file, **arrays)

    def _make_room(self) -> None:
        """Delete the oldest trainings' notes beyond the bounds, and never another file."""
        others = [f for f in self.folder.parent.glob(TRAINING) if f.is_dir() and f != self.folder]
        keep_newest(others, KEPT - 1, ROOM - _size(self.folder), FILES)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _harmlessly(client: Trainer, take: Callable[[], None]) -> None:
    """Take notes, leave model and random numbers as they were, and log every error."""
    device = client.site.device
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), torch.no_grad(), evaluating(client.model):
            take()
    except Exception as error:  # a full disk, a full GPU: the run is worth more than a note
        logger.warning("the notes of this round are not complete (%s); the round goes on", error)
