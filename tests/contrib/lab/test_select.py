"""`fedda select`: the table of candidates, without an adaptation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from fedda.results import selection as table
from tests.command_lines import call
from tests.test_fruda import make_line

pytestmark = pytest.mark.usefixtures("signal_handlers")

SETTINGS = (
    "model.name=mlp model.hidden=16 train.augment=none train.batch-size=20 train.lr=.5 "
    "exchange.min-examples=20 exchange.expose-features=true pretrain=4 measure.steps=30 "
    "train.steps=0 train.carry-momentum=false train.weight-decay=0"
)
ROW: dict[str, Any] = {
    "name": "a", "labelled": True, "eps": 0.125, "theta": 1.5, "w1": 2.0, "w1-error": 0.04,
    "bound": 8.66, "chosen": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shifted domains, all with labels, as `fedda select` takes them."""
    root = tmp_path_factory.mktemp("domains")
    for node in make_line(root):
        with np.load(node["data"]) as file:
            arrays = dict(file)
        arrays.setdefault("y_train", np.arange(len(arrays["x_train"])) % 3)
        np.savez(node["data"], **arrays)
    return root


def select(root: Path, target: str, *words: str, code: int = 0) -> Result:
    changes = [word for pair in SETTINGS.split() for word in ("-c", pair)]
    return call("select", "--data", root, "--target", target, *changes, *words, code=code)


def test_the_nearest_domain_is_chosen_and_nothing_is_adapted(domains: Path) -> None:
    before = sorted(domains.iterdir())
    selection = json.loads(select(domains, "far", "--json").stdout)
    assert selection["collaborator"] == "near" and "after" not in selection
    w1 = {row["name"]: row["w1"] for row in selection["candidates"]}
    assert w1["near"] < w1["home"] < w1["aside"]
    assert sorted(domains.iterdir()) == before


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("far,near", (), "one target is measured at a time"),
        ("far", ("-c", "rounds=3"), "the measurement is one round"),
        ("nowhere", (), "nowhere"),
        ("far", ("-c", "measure.stops=3"), "did you mean measure.steps"),
        ("far", ("-c", "exchange.min-examples=500", "-c", "exchange.p=25"), "500 examples"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    domains: Path, target: str, words: tuple[str, ...], message: str
) -> None:
    done = select(domains, target, *words, code=1)
    assert done.output.count("error: ") == 1 and message in done.output


def test_rows_by_hand() -> None:
    carried = ROW | {"name": "b", "labelled": False, "chosen": False}
    selection = {"selector": "ocs", "collaborator": "a", "candidates": [ROW, carried]}
    assert list(table.rows(selection)) == [
        ("a", "0.125", "1.5", "2 ± 0.04", "8.66", "chosen"),
        ("b", "0.125 (carried forward)", "1.5", "2 ± 0.04", "8.66", ""),
    ]
    pad = {k: v for k, v in ROW.items() if k not in ("w1", "w1-error", "bound")}
    pad |= {"pad": 1.5, "pad-error": 0.1}
    of_pad = {"selector": "pad", "collaborator": "a", "candidates": [pad]}
    assert list(table.rows(of_pad)) == [("a", "0.125", "1.5", "1.5 ± 0.1", "chosen")]
    for each in (selection, of_pad):
        assert {len(row) for row in table.rows(each)} == {len(table.headings(each))}


def test_the_outcome_names_negative_transfer() -> None:
    after = {"w1": 0.5, "eps": 0.25, "infomax-before": 1.0, "infomax-after": 0.4, "kept": "before"}
    selection = {"selector": "ocs", "collaborator": "a", "candidates": [ROW]}
    assert table.outcome(selection) == ""
    said = table.outcome({**selection, "after": after})
    assert said.endswith("; negative transfer: it keeps the model of a")
    assert "infomax 1.00 before, 0.40 after" in said
    assert "negative" not in table.outcome({**selection, "after": {**after, "kept": "after"}})
