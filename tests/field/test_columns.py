"""Columns of numbers are known by name: at all sites the same, and of a model those it learnt."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedda
from clients.site.memory import Site
from fedda import data, models
from fedda.cli.its_files import OPTIONS
from fedda.config.inputs import Inputs
from fedda.data import Reading, naming
from fedda.errors import ConfigError, DataError, FeddaError, RunError
from tests.command_lines import call

NAMES = ("age", "chol", "sex", "zinc")
FEW: Any = {"model_name": "mlp", "model_hidden": "8", "rounds": 6}
FEW |= {"train_batch_size": 30, "train_lr": 0.1}


def patients(seed: int, n: int = 80) -> pd.DataFrame:
    """Two classes in four columns, whose first says most and whose last says nothing."""
    draws, y = np.random.default_rng(seed), np.arange(n) % 2
    x = draws.normal(size=(n, 4)) + y[:, None] * np.array([4.0, 1.0, -1.0, 0.0])
    return pd.DataFrame(x, columns=list(NAMES)).assign(label=np.where(y, "ill", "well"))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals with a table each; the order in which the columns lie means nothing."""
    folder = tmp_path_factory.mktemp("hospitals")
    for seed, name in enumerate(("east", "north", "west")):
        found = patients(seed)
        found[found.columns[:: -1 if seed else 1]].to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def run(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> fedda.Run:
    folder = tmp_path_factory.mktemp("results")
    return fedda.simulate(sites, target="west", method="fedavg", dir=folder / "run", **FEW)


def test_sites_with_other_columns_are_refused(sites: Path, tmp_path: Path) -> None:
    for name in ("east", "north", "west"):
        found = pd.read_csv(sites / f"{name}.csv")
        renamed = {"chol": "cholesterol"} if name == "north" else {}
        (tmp_path / "sites").mkdir(exist_ok=True)
        found.rename(columns=renamed).to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    with pytest.raises(FeddaError, match="has the columns 'cholesterol', and lacks 'chol'"):
        fedda.simulate(
            tmp_path / "sites", target="west", method="fedavg", dir=tmp_path / "run", **FEW
        )


def test_a_table_is_predicted_by_the_names_of_its_columns(run: fedda.Run, tmp_path: Path) -> None:
    """Others in between, texts too, and another order change no answer; other names are refused."""
    model, new = run.folder / "model.safetensors", patients(9).drop(columns="label")
    wanted = run.model.predict(new.to_numpy(np.float32))
    assert np.mean([a == b for a, b in zip(wanted, ["well", "ill"] * 40, strict=True)]) > 0.8
    mixed = new[["zinc", "sex", "chol", "age"]].assign(bmi=5.0, ward="a")
    mixed.to_csv(tmp_path / "mixed.csv", index=False)
    found = call("predict", model, tmp_path / "mixed.csv")
    assert [line.split(",")[1] for line in found.output.splitlines()[1:]] == wanted
    assert run.model.predict(mixed) == run.model.predict(tmp_path / "mixed.csv") == wanted
    other = mixed.rename(columns={"age": "years"})
    other.drop(columns="ward").to_csv(tmp_path / "other.csv", index=False)
    assert "lacks 'age'" in call("predict", model, tmp_path / "other.csv", code=1).output
    with pytest.raises(DataError, match="lacks 'age'"):
        run.model.predict(other)
    turned = ("--columns", "values=chol+age+sex+zinc")
    found = call("predict", model, tmp_path / "mixed.csv", *turned, code=1)
    assert "in another order" in found.output


def test_arrays_that_name_their_columns_are_compared_too(run: fedda.Run, tmp_path: Path) -> None:
    x = patients(9).drop(columns="label")
    about = models.describe(run.folder / "model.safetensors").inputs
    for names, fits in ((NAMES, True), (NAMES[::-1], False)):
        np.savez(tmp_path / "new.npz", x=x[list(names)].to_numpy(np.float32), columns=list(names))
        form = Reading().form(about)
        if fits:
            assert len(data.load_target(tmp_path / "new.npz", **form)) == 80
        else:
            with pytest.raises(DataError, match="in another order"):
                data.load_target(tmp_path / "new.npz", **form)


def test_frames_of_a_program_bring_their_names(tmp_path: Path) -> None:
    frames = {name: patients(seed) for seed, name in enumerate(("east", "north", "west"))}
    given = {n: (f.drop(columns="label"), f["label"]) for n, f in frames.items()}
    x, y = given["north"]
    turned = given | {"north": (x[list(NAMES[::-1])], y)}
    run, other = (
        fedda.simulate(sites, target="west", method="fedavg", dir=tmp_path / name, **FEW)
        for name, sites in (("run", given), ("turned", turned))
    )
    np.testing.assert_array_equal(run.model.probabilities(x), other.model.probabilities(x))
    assert models.describe(run.folder / "model.safetensors").inputs.columns == NAMES


def test_a_run_does_not_choose_a_sites_columns(sites: Path) -> None:
    """What a server says of columns is not followed: a site trains on all that it has, or not."""
    node = {"role": "source", "name": "east", "data": str(sites / "east.csv")}
    site = Site(node | {"reproducible": True})
    assert site.offer()["columns"] == list(NAMES)
    for others in (("zinc",), (*NAMES, "iron"), NAMES[::-1]):
        with pytest.raises(DataError, match="where the run has others: give the data that this"):
            site.training(Inputs((len(others),), columns=others))
    assert site.training(Inputs((4,), columns=NAMES)).shape == (4,)
    assert site.training(Inputs((4,))).shape == (4,)


def test_names_of_a_wide_table_become_one_digest() -> None:
    wide = [f"gene-{i:05}" for i in range(5000)]
    (digest,) = naming.brief(wide)
    assert digest.startswith("5000 columns") and naming.brief(wide[::-1]) != (digest,)
    assert naming.brief(wide[:10]) == tuple(wide[:10])


def test_a_printed_command_has_all_that_was_said_of_the_files() -> None:
    """Commands that name another to type next let it read the same files."""
    said = Reading.of("validation", 12, True, True, "label=diagnosis,values=age+sex")
    assert {word[2:].replace("-", "_") for word in said.words if word[:2] == "--"} == {*OPTIONS}
    values = [said.words[said.words.index(flag) + 1] for flag in ("--split", "--gray-bits")]
    assert values == ["validation", "12"] and Reading().words == []


ODD = {
    "index": ({"": np.arange(80)}, "the column '' has row numbers"),
    "Unnamed: 0": ({"Unnamed: 0": np.arange(80)}, "the column 'Unnamed: 0' has row numbers"),
    "identifier": ({"patient": 7 * np.arange(80) + 1000}, "the column patient has another whole"),
    "outcome": ({"outcome": np.arange(80) % 2}, "the column outcome alone says each row's class"),
    "gaps": (
        {"salt": np.where(np.arange(80) % 9, np.linspace(0, 5, 80), -999)},
        "salt of the vectors: -999 in many",
    ),
    "gaps above": (
        {"salt": np.where(np.arange(80) % 9, np.arange(80) % 3, 9)},
        "salt of the vectors: 9 in many",
    ),
    "far": (
        {"salt": np.linspace(1e6, 2e6, 80) + 0.5},
        "column salt of the vectors: values of about",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_that_may_be_no_measurements_are_named(kind: str, tmp_path: Path) -> None:
    more, warning = ODD[kind]
    pd.concat([pd.DataFrame(more), patients(0)], axis=1).to_csv(tmp_path / "a.csv", index=False)
    done = call("data", "check", tmp_path / "a.csv")
    assert warning in " ".join(done.output.split())
    (width,) = data.describe(tmp_path / "a.csv", "source").shape
    assert width == 4 + ("row numbers" not in warning)
    patients(0).to_csv(tmp_path / "plain.csv", index=False)
    assert not data.describe(tmp_path / "plain.csv", "source").warnings


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diagnosis", r"no column label \(it has age, .*diagnosis.*\).*--columns label="),
        ("Label", r"has the column Label, which seems to hold labels.*--columns label=Label"),
    ],
)
def test_a_source_whose_labels_have_another_name_is_told_the_option(
    name: str, words: str, tmp_path: Path
) -> None:
    patients(0).rename(columns={"label": name}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=words):
        data.describe(tmp_path / "a.csv", "source")


def test_a_target_s_labels_are_no_measurements(tmp_path: Path) -> None:
    found = patients(0)
    found = found.assign(label=found["label"] == "ill").astype({"label": int})
    found.rename(columns={"label": "LABEL"}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=r"the column LABEL, which .*--columns label=LABEL"):
        data.describe(tmp_path / "a.csv", "target")
    for words in ("label=LABEL", "values=age+chol+sex+zinc"):
        said = data.describe(tmp_path / "a.csv", "target", reading=Reading(columns=words))
        assert said.columns == NAMES


@pytest.mark.parametrize("names", [["a\nb", "c"], ["a" * 300, "c"], ["a\x1b[2J", "c"], ["c", "c"]])
def test_names_that_are_no_plain_ones_are_compared_all_the_same(names: list[str]) -> None:
    (digest,) = naming.brief(names)
    assert digest.isprintable() and digest.startswith("2 columns")
    assert naming.brief(names[::-1]) != (digest,) or names == names[::-1]


def test_a_name_may_hold_for_one_site_alone() -> None:
    said = Reading.of(columns="north:label=outcome,label=diagnosis,south:drop=visit,path=p")
    assert said.at("west").named == {"label": "diagnosis", "path": "p"}
    with pytest.raises(ConfigError, match="names the site 'north', and here is one site's data"):
        assert said.named
    assert said.at("north").named == {"label": "outcome", "path": "p"}
    assert said.at("south").dropped == ("visit",) and not said.at("north").dropped
    assert Reading.said(said.at("north").flat()) == said.at("north")
    for odd in ("north:label=a,north:label=b", "north:age=a", "drop=a+a", "drop=", "north:label="):
        with pytest.raises(ConfigError, match="--columns is"):
            Reading.of(columns=odd).at("north")


def test_a_table_alone_in_a_folder_is_the_folders(tmp_path: Path) -> None:
    """As hospitals hand it over, `north/patients.csv`; beside anything else it must be named."""
    rows = [f"{i},{i % 3},{i % 2}" for i in range(60)]
    for name in ("north", "south"):
        (tmp_path / "sites" / name).mkdir(parents=True)
        table = tmp_path / "sites" / name / "patients.csv"
        table.write_text("\n".join(["age,stage,label", *rows]))
    assert data.verify(table.parent, "source").train == 60
    about: Any = {"preset": "table", "rounds": 1, "run_refine": "none", "quiet": True}
    run = fedda.simulate(tmp_path / "sites", "south", "fedavg", dir=tmp_path / "r", **about)
    assert len(run.model.predict(table.parent)) == 60
    texts = [f"{i},day {i},{i % 2}" for i in range(90)]
    table.write_text("\n".join(["age,seen,label", *texts]))
    with pytest.raises(DataError, match="or drop=seen"):
        data.verify(table.parent, "source")
    (table.parent / "scan").mkdir()
    with pytest.raises(DataError, match="images"):
        data.verify(table.parent, "source")


@pytest.mark.parametrize("cell", ["1.776", "1.234.567", "101.5"])
def test_a_point_beside_decimal_commas_is_refused(tmp_path: Path, cell: str) -> None:
    """With German marks 1.776 is 1776: read as a number it would be a thousandth of that."""
    rows = [f"3{i % 10},1;{811 if i < 700 else cell};{i % 2}" for i in range(1500)]
    (tmp_path / "a.csv").write_text("\n".join(["temp;platelets;label", *rows]))
    with pytest.raises(DataError, match=f"30,1 in the column temp.*{cell} in the column platelets"):
        data.verify(tmp_path / "a.csv", "source")
    (tmp_path / "b.csv").write_text((tmp_path / "a.csv").read_text().replace(cell, "1776"))
    assert data.verify(tmp_path / "b.csv", "source").train == 1500


def test_sites_with_labels_of_other_names_columns_to_leave_out_and_decimal_commas(
    tmp_path: Path,
) -> None:
    """Three exports as hospitals have them are simulated as they are."""
    draws, sites = np.random.default_rng(0), tmp_path / "sites"
    sites.mkdir()
    for name, label in (("north", "outcome"), ("south", "diagnosis"), ("west", "Diagnose")):
        y = np.arange(80) % 2
        frame = pd.DataFrame({"age": draws.normal(50, 9, 80), "chol": y + draws.normal(0, 0.1, 80)})
        frame["visit"], frame[label] = [f"2024-01-{i % 28 + 1}" for i in range(80)], y
        european: Any = {"sep": ";", "decimal": ","} if name == "south" else {}
        frame.to_csv(sites / f"{name}.csv", index=False, **european)
    columns = "label=outcome,south:label=diagnosis,west:label=Diagnose,drop=visit"
    its = Reading(columns=columns).at("south")
    south = data.describe(sites / "south.csv", "source", reading=its)
    assert south.shape == (2,) and south.counts == {"0": 40, "1": 40}
    x = data.load_source(sites / "south.csv", reading=its).x
    assert 30 < float(x[:, 0].mean()) < 70  # "50,3" is fifty
    with pytest.raises(RunError, match=r"names the site 'wst', and .* has north, south, west"):
        data.domains(sites, Reading(columns="wst:label=Diagnose"), ["west"])
    about: Any = {"rounds": 3, "run_refine": "none", "baseline": "none", "quiet": True}
    about["preset"] = "table"
    run = fedda.simulate(sites, "west", "fedavg", columns=columns, dir=tmp_path / "r", **about)
    assert len(run.model.predict(sites / "north.csv")) == 80  # its columns are found by name
    with pytest.raises(DataError, match="no column nowhere to leave out"):
        data.describe(sites / "south.csv", "source", reading=Reading(columns="drop=nowhere"))
