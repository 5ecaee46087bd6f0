"""`fedda teacher clip`: a network that knows pictures and words makes a teacher's file."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedda import data
from fedda.cli import app
from fedda.errors import DataError
from tests.test_teacher import answered

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of images of 36 pixels, of which the middle 32 count: nothing is resized."""
    draws = np.random.default_rng(1)
    for i in range(30):
        path = tmp_path / "clinic" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (36, 36, 3), dtype=np.uint8)).save(path)
    return tmp_path / "clinic"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Random weights of a tiny network, which open_clip knows as fedda-tiny."""
    open_clip: Any = pytest.importorskip("open_clip")
    (tmp_path / "networks").mkdir()
    (tmp_path / "networks" / "fedda-tiny.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path / "networks")
    torch.manual_seed(0)
    torch.save(open_clip.create_model("fedda-tiny").state_dict(), tmp_path / "tiny.pt")
    return tmp_path / "tiny.pt"


def asked(*words: object) -> Any:
    return CliRunner().invoke(app, ["teacher", "clip", *map(str, words)])


def test_a_network_of_pictures_and_words_makes_the_file(
    pictures: Path, tiny: Path, tmp_path: Path
) -> None:
    """Each row against open_clip's own steps for that image."""
    open_clip: Any = importlib.import_module("open_clip")
    out = tmp_path / "clip.csv"
    words = [pictures, "--classes", "cat,dog", "--network", "fedda-tiny", "--weights", tiny]
    words += ["--called", "dog=hound", "--sentence", "a {}", "--sentence", "one {} here"]
    done = asked(*words, "--out", out, "--batch", 7)
    assert done.exit_code == 0, done.output
    model = open_clip.create_model("fedda-tiny", str(tiny)).eval()
    token, prepare = open_clip.get_tokenizer("fedda-tiny"), open_clip.image_transform(32, False)
    texts = []
    for word in ("cat", "hound"):
        z = [model.encode_text(token([f.format(word)]))[0] for f in ("a {}", "one {} here")]
        t = torch.stack([each / each.norm() for each in z]).mean(dim=0)
        texts.append(t / t.norm())
    names, p = data.names(pictures), answered(out, pictures)
    for i in (0, 9, 29):
        v = model.encode_image(prepare(Image.open(pictures / names[i]).crop((2, 2, 34, 34)))[None])[
            0
        ]
        scores = torch.stack([model.logit_scale.exp() * (v / v.norm()) @ t for t in texts])
        torch.testing.assert_close(p[i], scores.softmax(dim=0).detach(), atol=1e-4, rtol=0)


def test_no_weights_are_fetched(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fetches them reads this when open_clip imports it."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    seen = []

    def needed(*_: str) -> None:
        seen.append(os.environ.get("HF_HUB_OFFLINE"))
        raise DataError("not here")

    monkeypatch.setattr("fedda.contrib.lab.clip.needed", needed)
    asked(pictures, "--classes", "cat,dog", "--out", pictures / "clip.csv")
    assert seen == ["1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--classes", "cat"], "give two or more different names"),
        (["--classes", "cat,dog", "--network", "fedda-none"], "open_clip has no network"),
        (["--classes", "cat,dog", "--sentence", "a photo"], "has no place for the class"),
        (["--classes", "cat,dog", "--called", "bird=crow"], "is not CLASS=WORDS"),
        (["--classes", "cat,dog", "--network", "fedda-tiny", "--weights", "nowhere"], "cannot be"),
    ],
)
def test_what_it_cannot_do_is_said(
    words: list[str], text: str, pictures: Path, tiny: Path, tmp_path: Path
) -> None:
    done = asked(pictures, "--out", tmp_path / "clip.csv", *words)
    assert done.exit_code == 1 and text in done.output and not (tmp_path / "clip.csv").exists()
