"""Columns of texts: all sites code them by the run's list, which a model's file holds."""

import csv
import itertools
import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedda
from clients.site.memory import Site
from fedda import data, models
from fedda.config.inputs import categories_of
from fedda.data import Reading, naming
from fedda.data.categories import (
    FEW_NUMBERS,
    Coding,
    advice,
    alone,
    apart,
    coded,
    together,
)
from fedda.errors import ConfigError, DataError, FeddaError
from fedda.library.program_inputs import frame
from fedda.settings import RunConfig
from tests.command_lines import call

LIST = "sex=female|male, thal=normal|fixed|reversible"
CODED = ("age", "sex=female|male", "thal=normal", "thal=fixed", "thal=reversible")
FEW: Any = {"preset": "table", "train_lr": 0.05, "run_refine": "none", "quiet": True}


def patients(seed: int, n: int = 90) -> pd.DataFrame:
    """Two classes that thal tells nearly always, and the sites write it in their own ways."""
    draws, y = np.random.default_rng(seed), np.arange(n) % 2
    thal = np.where(y == 1, "reversible", np.where(draws.random(n) < 0.5, "normal", "fixed"))
    sex = np.where(draws.random(n) < 0.5, "male", "female")
    found = pd.DataFrame({"age": draws.normal(50, 9, n) + y, "thal": thal, "sex": sex})
    return found.assign(label=np.where(y, "ill", "well"))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals; west writes as it likes, and has nobody whose thal is fixed."""
    folder = tmp_path_factory.mktemp("categories") / "hospitals"
    folder.mkdir()
    for seed, name in enumerate(("east", "north", "west")):
        found = patients(seed)
        if name == "west":
            found["sex"] = found["sex"].str.upper()
            found["thal"] = found["thal"].replace("fixed", "normal ")
            found.loc[:4, "thal"] = None
        found.to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def run(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> fedda.Run:
    folder = tmp_path_factory.mktemp("results")
    about = {"dir": folder / "run", "input_categories": LIST}
    return fedda.simulate(sites, "west", "fedavg", **about, **FEW)


def test_several_ways_to_write_a_value() -> None:
    """By hand: four hospitals' ways to write a sex are one column of 0 and 1."""
    declared = categories_of("sex=female/f/weiblich|male/m/männlich, thal=a/b|c|d")
    names = coded(("sex", "thal"), declared)
    assert names[0] == "sex=female/f/weiblich|male/m/männlich" and names[1] == "thal=a/b"
    x = torch.tensor([[float(i), float(i % 3)] for i in range(5)])
    texts = {"sex": ("F", "Weiblich", "m", "male", "M\u00e4nnlich"), "thal": ("A", "b", "c")}
    (made,) = Coding(("sex", "thal"), names, texts, "here", False).every(iter([x]))
    assert made[:, 0].tolist() == [0, 0, 1, 1, 1]
    assert made[:, 1].tolist() == [1, 1, 0, 1, 1]
    for odd in ("sex=f/m|m", "sex=f/F|m/f", "sex=f/|m"):
        with pytest.raises(ConfigError, match="each column once"):
            RunConfig.parse({"input.categories": odd})


def test_a_value_at_one_site_alone_is_named() -> None:
    sites = {"north": ("sex=female|male",), "south": ("sex=F|M", "town=x|y"), "west": ("sex=male",)}
    (first,) = alone(sites, {})  # town: nobody else's
    assert "has male, female at north, west, and F, M at south, none in common" in first
    mixed = sites | {"east": ("sex=F|male",)}  # all hang together
    first, second = alone(mixed, {})
    assert first.startswith("north alone has female in the column sex")
    assert second.startswith("south alone has M in the column sex")
    assert not alone(sites, categories_of("sex=female/f|male/m"))


def test_dates_are_not_proposed_as_kinds() -> None:
    dates = {"a": ("day=2024-01-01|2024-02-01",), "b": ("day=2024-01-01|2024-02-01",)}
    (said,) = alone(dates, {})
    assert said.startswith("the column day seems to hold dates") and "drop=day" in said
    assert not alone(dates, categories_of("day=2024-01-01|2024-02-01"))
    assert not alone({"a": ("ward=1-2|3-4",), "b": ("ward=1-2|3-4",)}, {})


def test_sites_without_a_common_value_are_named_though_none_has_it_alone() -> None:
    sites = {"a": ("sex=F|M",), "b": ("sex=f|m",), "c": ("sex=female|male",), "d": ("sex=male",)}
    for listed in ({}, categories_of("sex=F|female|M|male")):
        (said,) = apart(sites, listed).values()
        assert "at a, b, and male, female at c, d, none in common" in said
        assert alone(sites, listed) == [said]
    assert not apart(sites, categories_of("sex=F/female|M/male"))
    assert together(sites, ["sex"]) == "sex=..."  # no run takes it
    with pytest.raises(ConfigError):
        RunConfig.parse({"input.categories": "sex=..."})


def numbered(values: list[Any]) -> tuple[np.ndarray, Any]:
    """A column's cells as numbers, and the texts that they mean."""
    numbers, texts = frame({"t": values}, "a table")
    return numbers[:, 0], texts.get("t", ())


def test_cells_are_numbered() -> None:
    numbers, texts = numbered(["b", "A", None, "?", " a "])
    assert texts == ("a", "b") or texts == ("A", "b")
    assert numbers[[0, 1, 4]].tolist() == [1, 0, 0] and np.isnan(numbers[2:4]).all()
    assert numbered(["1", 2.5, ""])[1] == ()
    for odd in (["1", "a"], ["a,b"], ["a|b"], [f"name {i}" for i in range(65)]):
        with pytest.raises(DataError, match=r"a table has .* in its column t: numbers, or a few"):
            numbered(odd)


@pytest.mark.parametrize(
    "cell", ["1'234", "1\u2019234", "1 234", "1\u00a0234.5", "1\u202f234", "1.234.567", "1,234"]
)
@pytest.mark.parametrize("other", ["5%", "5 %", "(5)", "\u22125"])
def test_numbers_with_marks_are_no_kinds(cell: str, other: str) -> None:
    """At a target, which tells no values, they would become a column for each."""
    for few in ([cell], [other], [cell, other, ""]):
        with pytest.raises(DataError, match=r"a table has .* in its column t: numbers, or a few"):
            numbered(few)
    for kinds in (["<40", ">=40"], ["0-4", "5-9", "10+"], ["5%", "saline"], ["5 mg", "10 mg"]):
        assert len(numbered(kinds)[1]) == len(kinds)


@pytest.mark.parametrize("fills", [True, False])
def test_a_server_cannot_make_each_number_of_a_measurement_a_column(fills: bool) -> None:
    """The weights of a column for one age would be of the one patient who has it."""
    for many in (FEW_NUMBERS, FEW_NUMBERS + 1):
        ages = range(30, 30 + many)
        names = coded(("age",), {"age": [*map(str, ages)]})
        coding = Coding(("age",), names, {}, "here", fills=fills)
        some = iter([torch.tensor([float(age)] * 2)[:, None] for age in ages])
        if many == FEW_NUMBERS:
            assert torch.cat([*coding.every(some)]).sum() == 2 * FEW_NUMBERS
            continue
        with pytest.raises(DataError, match="here has more than 16 different numbers in its"):
            list(coding.every(some))


def test_accents_and_zeros_make_no_difference_and_long_numbers_do() -> None:
    composed, decomposed = "m\u00e4nnlich", "ma\u0308nnlich"
    numbers, its = numbered([composed, "weiblich", decomposed])
    assert len(its) == 2 and numbers.tolist() == [0, 1, 0]
    names = coded(("sex",), categories_of(f"sex={decomposed}|weiblich"))
    made = Coding(("sex",), names, {"sex": (composed, "weiblich")}, "here", fills=False)
    (x,) = made.every(iter([torch.tensor([[0.0], [1.0]])]))
    assert x.tolist() == [[0], [1]]
    assert naming.plain("007.0") == naming.plain(" 7") and naming.plain("0") == "0"
    assert naming.plain("1234567") != naming.plain("1234568")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("dose=none|some", "'none' of the column dose, which means"),
        ("dose=a|NA|b", "'NA' of the column dose"),
    ],
)
def test_a_list_that_no_table_can_follow_is_refused(odd: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        coded(("dose",), categories_of(odd))


@pytest.mark.parametrize("cell", [["a"], {"a": 1}, b"a", pd.Timestamp("2026-01-01"), "2026-01-01"])
def test_cells_of_any_kind_are_texts_or_refused_in_a_sentence(tmp_path: Path, cell: Any) -> None:
    frame = pd.DataFrame({"kind": [cell] * 50, "label": ["a", "b"] * 25})
    frame.to_parquet(tmp_path / "a.parquet", index=False)
    with pytest.raises(DataError, match=r"numbers, or a few texts|has texts in kind") as refused:
        data.load_source(tmp_path / "a.parquet")
    assert ("has texts" in str(refused.value)) == (not isinstance(cell, list | dict))
    assert "b'a'" not in str(refused.value)


def test_a_column_of_texts_in_one_set_of_a_site_alone_is_refused(tmp_path: Path) -> None:
    """The numbers of the other set would count as numbers of these texts."""
    train, y = pd.DataFrame({"sex": [0, 1] * 30}), ["a", "b"] * 30
    test = pd.DataFrame({"sex": ["female", "male"] * 30})
    sites: Any = {name: (train, y, (test, y)) for name in ("a", "b", "t")}
    with pytest.raises(DataError, match="has texts in the column sex of one set and numbers in"):
        fedda.simulate(sites, "t", "fedavg", dir=tmp_path, input_categories="sex=female|male")


def test_a_line_to_type_runs_nothing_else(tmp_path: Path) -> None:
    """Names and values come from other people's files."""
    odd = "a $(touch it) `touch it` ' \" \\ !x"
    (tmp_path / "a.csv").write_text(f'sex,label\n"{odd.replace(chr(34), chr(34) * 2)}",a\nb,b\n')
    (text,) = data.describe(tmp_path / "a.csv", "source").texts
    line = advice([text])
    either = (f"sex=b|{odd}", f"sex={odd}|b")
    assert shlex.split(line) in [["-c", f"input.categories={texts}"] for texts in either]
    subprocess.run(["sh", "-c", f"true {line}"], cwd=tmp_path, check=True)
    assert not (tmp_path / "it").exists()


def test_a_coding_by_hand() -> None:
    """A number may be declared, too: cp=1|2|3 of a column of numbers."""
    own = ("age", "sex", "cp")
    names = coded(own, categories_of("sex=f|m,cp=1|2|3"))
    rows = [[50.0, 0.0, 2.0], [60.0, 1.0, 4.0], [70.0, math.nan, 3.0]]
    coding = Coding(own, names, {"sex": ("M", "f")}, "here", fills=True)
    (x,) = coding.every(iter([torch.tensor(rows)]))
    nan = math.nan
    wanted = [[50, 1, 0, 1, 0], [60, 0, nan, nan, nan], [70, nan, 0, 0, 1]]
    assert torch.equal(x.nan_to_num(-1), torch.tensor(wanted).nan_to_num(-1))
    strict = Coding(own, names, {"sex": ("M", "f")}, "here", fills=False)
    with pytest.raises(DataError, match=r"here has 1 value in its column cp that"):
        list(strict.every(iter([torch.tensor(rows[:1]), torch.tensor(rows[1:])])))


def test_sites_that_write_alike_train_and_the_model_predicts(run: fedda.Run, sites: Path) -> None:
    """Without the texts the classes cannot be told: age says nearly nothing."""
    about = models.describe(run.folder / "model.safetensors")
    assert about.inputs.columns == CODED and about.shape == (5,)
    assert run.results.accuracy is None  # west has no tests
    new, place = patients(9), sites.parent / "new.csv"
    new.drop(columns="label")[["thal", "age", "sex"]].to_csv(place, index=False)
    done = call("predict", run.folder, place)
    answers = [row["class"] for row in csv.DictReader(done.output.splitlines())]
    assert np.mean(np.array(answers) == new["label"]) > 0.95
    assert answers == run.model.predict(place)
    assert answers == run.model.predict(new.drop(columns="label"))
    refined = sites.parent / "r.safetensors"
    call("refine", run.folder, "--data", sites / "west.csv", "--out", refined)
    assert models.describe(refined).inputs.columns == CODED


def test_texts_where_a_model_takes_numbers_are_refused(run: fedda.Run, sites: Path) -> None:
    """Their places in the alphabet would count as ages."""
    odd, place = patients(9).drop(columns="label").assign(age="old"), sites.parent / "odd.csv"
    odd.to_csv(place, index=False)
    given: Any = {n: (patients(i)[["age"]], patients(i)["label"]) for i, n in enumerate("abt")}
    plain = fedda.simulate(given, "t", "fedavg", dir=sites.parent / "plain", **FEW)
    for model, given in ((run.model, odd), (run.model, place), (plain.model, odd[["age"]])):
        with pytest.raises(DataError, match="has texts in age, and a run or model needs numbers"):
            model.predict(given)
    patients(9)[["age", "thal"]].to_csv(place, index=False)
    with pytest.raises(DataError, match="lacks 'sex', and the model"):
        run.model.predict(place)


def test_frames_of_a_program_are_coded_alike(run: fedda.Run, sites: Path, tmp_path: Path) -> None:
    """The same run from tables in memory: every weight is the same."""
    frames = {p.stem: pd.read_csv(p) for p in sorted(sites.glob("*.csv"))}
    order = ["age", "sex", "thal"]
    given: Any = {n: (f[order], f["label"]) for n, f in frames.items()}
    other = fedda.simulate(
        given, "west", "fedavg", dir=tmp_path / "run", input_categories=LIST, **FEW
    )
    for name, weights in run.model.network.state_dict().items():
        assert torch.equal(weights, other.model.network.state_dict()[name])


def test_texts_that_no_run_lists_are_refused_with_the_line_to_give(sites: Path) -> None:
    line = r'input_categories="sex=female\|male, thal=fixed\|normal\|reversible"'
    with pytest.raises(FeddaError, match=line):
        fedda.simulate(sites, "west", "fedavg", dir=sites.parent / "none", **FEW)
    for load in (data.load_source, data.load_target):
        with pytest.raises(DataError, match="has texts in sex, thal, and a run or model needs"):
            load(sites / "east.csv")
    with pytest.raises(DataError, match="has texts in"):
        list(data.batches(sites / "east.csv", (3,), 16))
    said = data.describe(sites / "east.csv", "source")
    assert said.texts == ("sex=female|male", "thal=fixed|normal|reversible")
    assert said.columns == ("age", "sex", "thal") and "has texts in sex, thal" in said.warnings[0]
    with pytest.raises(DataError, match="has texts in thal,"):
        said.check_fit(("ill", "well"), "", "mean", CODED[:2])
    assert "input.categories=" in call("data", "check", sites / "east.csv").output


def test_a_value_that_is_not_listed_is_an_error_or_missing(
    sites: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs = coded(("age", "sex", "thal"), categories_of("sex=female|male,thal=normal|fixed|absent"))
    strict = Reading().within("", "refuse", needs)
    count = pd.read_csv(sites / "east.csv")["thal"].tolist().count("reversible")
    with pytest.raises(DataError, match=rf"has {count} values in its column thal that"):
        data.load_source(sites / "east.csv", reading=strict)
    filled = data.load_source(sites / "east.csv", reading=Reading().within("", "mean", needs)).x
    assert not filled.isnan().any() and filled.shape == (90, 5)
    assert f"{count} values in its column thal" in caplog.text and "reversible" not in caplog.text


def test_a_site_codes_but_leaves_no_column_to_the_server(sites: Path) -> None:
    """What a site offers has no texts; a list for other columns is not followed."""
    node = {"role": "source", "name": "east", "data": str(sites / "east.csv")}
    site = Site(node | {"reproducible": True})
    offered = site.offer()
    assert offered["columns"] == ["age", "sex", "thal"] and "female" not in str(offered)
    config = RunConfig.parse({"input.categories": LIST})
    task = config.task("fedavg", 0, (5,), ["ill", "well"], 3, columns=CODED)
    site.check_fit(task)
    assert site.training(task.inputs).shape == (5,)
    one = task.model_copy(update={"column_names": "\n".join(CODED[1:])})
    with pytest.raises(DataError, match=r"has the columns 'age', where the run has others"):
        site.training(one.inputs)


def test_a_look_tells_nothing_of_texts_but_that_they_are_there(sites: Path, tmp_path: Path) -> None:
    call("look", "--data", sites, "--target", "west", "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "look.json").read_text())
    for site in told["sites"]:
        assert site["columns"] == ["age", "sex", "thal"]
        arrays = site["arrays"]
        assert arrays["missing"] == [0.0, 1.0, 1.0] and not any(arrays["share"][1])
        assert arrays["mean"][0] > 40 and arrays["mean"][1:] == [0.0, 0.0]
    # Whoever simulates has the tables: the settings that are proposed list their texts.
    assert "male" not in str(told["sites"]) and "reversible" not in str(told["sites"])


def test_a_table_with_texts_is_a_site_among_others(sites: Path, tmp_path: Path) -> None:
    assert set(data.domains(sites)) == {"east", "north", "west"}
    (tmp_path / "notes.csv").write_text("name,label\nx,y\n")
    with pytest.raises(DataError, match=r"notes\.csv has no number in its first row"):
        data.domains(tmp_path)


@pytest.mark.contrib
def test_rows_are_named_by_an_identifier(sites: Path, tmp_path: Path) -> None:
    named = pd.read_csv(sites / "east.csv").assign(patient=[f"P-{i:03}" for i in range(90)])
    named.to_csv(tmp_path / "east.csv", index=False)
    words = ("label", "--n", 9, "--target")
    for i, more in enumerate((["--id", "patient"], ["--columns", "id=patient"])):
        call(*words, tmp_path / "east.csv", "--out", tmp_path / f"out-{i}", *more)
        with (tmp_path / f"out-{i}" / "labels.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 9 and all(row["key"] == f"P-{int(row['file']):03}" for row in rows)
    odd = (sites / "east.csv", "--out", tmp_path / "odd", "--id", "nobody")
    assert "--id is nobody" in call(*words, *odd, code=1).output
    assert not (tmp_path / "odd").exists()  # so that the next try needs no other name


@pytest.mark.parametrize("seed", range(3))
def test_a_coding_is_what_a_naive_one_gives(seed: int) -> None:
    draws = np.random.default_rng(seed)
    texts = [str(draws.choice(["x", "y", "z"])) for _ in range(50)]
    numbers, its = numbered(texts)
    for order in itertools.permutations(("x", "y", "z")):
        names = coded(("t",), {"t": order})
        made = Coding(("t",), names, {"t": its}, "here", fills=False)
        (x,) = made.every(iter([torch.from_numpy(numbers).float()[:, None]]))
        assert x.tolist() == [[float(text == each) for each in order] for text in texts]
