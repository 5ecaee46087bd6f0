"""Data sets of Hugging Face, fetched and cut into sites, from a mirror that is made here."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedda
from fedda import data
from fedda.data import table
from tests.command_lines import call

arrow = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

CLASSES, DOMAINS = ("dog", "elephant"), ("cartoon", "photo", "sketch")
FEATURES = {"image": {"_type": "Image"}, "domain": {"dtype": "string", "_type": "Value"}}
FEATURES |= {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(out, "png")
    return out.getvalue()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A cache's folder: two files of 60 rows each, which are links; dogs are dark."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    (folder / "data").mkdir(parents=True)
    blobs.mkdir()
    about = {b"huggingface": json.dumps({"info": {"features": FEATURES}})}
    for shard in range(2):
        rows = range(60 * shard, 60 * shard + 60)
        made = {
            "image": [{"bytes": png(40 + i + 60 * (i % 2)), "path": f"{i}.png"} for i in rows],
            "domain": [DOMAINS[i % 3] for i in rows],
            "label": [i % 2 for i in rows],
        }
        parquet.write_table(arrow.table(made).replace_schema_metadata(about), blobs / str(shard))
        (folder / "data" / f"train-0000{shard}-of-00002.parquet").symlink_to(blobs / str(shard))
    return folder


def fetched(monkeypatch: pytest.MonkeyPatch, mirror: Path | Exception) -> list[Any]:
    """Let huggingface_hub give a folder, or fail -> what it was asked for."""
    asked: list[Any] = []

    def snapshot_download(name: str, **about: str) -> str:
        asked.append((name, about))
        if isinstance(mirror, Exception):
            raise mirror
        return str(mirror)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # pyright: ignore
    return asked


def test_a_data_set_becomes_sites(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, out = fetched(monkeypatch, mirror), tmp_path / "pacs"
    done = call("data", "hub", "flwrlabs/pacs", out)
    assert asked == [("flwrlabs/pacs", {"repo_type": "dataset", "allow_patterns": "*.parquet"})]
    assert f"{out}/sketch: 40 examples" in done.output.replace("\n", "")
    assert list(data.domains(out)) == list(DOMAINS)
    for domain in DOMAINS:
        found = data.verify(out / domain, "source")
        assert found.classes == CLASSES and (found.train, found.test) == (32, 8)
        assert data.describe(out / domain, "target").counts == {}
        train = data.load_source(out / domain)
        assert ((train.x[:, 0, 0, 0] % 2 == 0) == (train.y == 0)).all()
    about: Any = {"model_name": "mlp", "model_hidden": "8", "rounds": 1, "quiet": True}
    run = fedda.simulate(out, "sketch", "fedavg", dir=tmp_path / "run", **about)
    assert run.results.accuracy is not None
    again = call("data", "hub", "flwrlabs/pacs", out, code=1)
    assert "is not empty, and nothing is overwritten" in again.output


def test_a_folder_of_its_files_needs_no_network(mirror: Path, tmp_path: Path) -> None:
    call("data", "hub", mirror, tmp_path / "out", "--test-share", 0, "--by", "label")
    assert data.describe(tmp_path / "out" / "dog", "target").train == 60


def test_an_interrupted_one_leaves_no_half_and_begins_again(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched(monkeypatch, mirror)
    write = table._write

    def stopped(file: Path, *rest: Any) -> None:
        if "00001" in file.name:
            raise KeyboardInterrupt
        write(file, *rest)

    monkeypatch.setattr(table, "_write", stopped)
    assert call("data", "hub", "flwrlabs/pacs", tmp_path / "out", code=None).exit_code != 0
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(table, "_write", write)
    call("data", "hub", "flwrlabs/pacs", tmp_path / "out")
    assert not (tmp_path / ".out.part").exists()
    assert data.describe(tmp_path / "out" / "photo", "target").train > 20


def test_what_cannot_be_is_one_sentence(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said(*words: str | Path) -> str:
        done = call("data", "hub", *words, tmp_path / "out", code=1)
        assert "Traceback" not in done.output
        return " ".join(done.output.split())

    fetched(monkeypatch, OSError("no such\nhost"))
    assert "flwrlabs/pac cannot be fetched from Hugging Face (no such host)" in said("flwrlabs/pac")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # pyright: ignore
    assert "pip install 'fedda[hub]'" in said("flwrlabs/pacs")
    assert "has no column clinic (image, domain, label" in said(mirror, "--by", "clinic")
    (tmp_path / "empty").mkdir()
    assert "has no parquet files" in said(tmp_path / "empty")
