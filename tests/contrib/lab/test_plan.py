"""Of comparisons: folders, seeds, engines, and what is said of the files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedda.contrib.lab.comparison import Plan, Variant, options
from fedda.data import Reading
from fedda.errors import ConfigError, FeddaError
from fedda.ops import engines


def test_a_folder_that_cannot_be_written_is_named_once_and_without_a_number(tmp_path: Path) -> None:
    place = tmp_path / "file" / "run"
    place.parent.touch()
    plan = cast(Any, SimpleNamespace(out=place, data=tmp_path))
    with pytest.raises(FeddaError, match=r"\(Not a directory\)[:;] ") as caught:
        Plan.begin(plan)
    assert str(caught.value).count(str(place)) == 1


def test_an_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--engine ray"):
        options.jobs_of(1, 1, "ray")


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("5,6", (5, 6)), ("7,", (7,))])
def test_seeds_mean_the_same_in_every_command(text: str, seeds: tuple[int, ...]) -> None:
    assert tuple(options.seeds_of(text)) == seeds


def test_a_printed_command_has_all_that_was_said_of_the_files() -> None:
    """`fedda choose` and the like name a command to type next, which reads the same files."""
    said = Reading.of("validation", 12, True, True, "label=diagnosis,values=age+sex")
    plan = Plan(Path("sites"), Path("out"), [Variant("fedavg")], ["west"], [0], {}, reading=said)
    assert plan.where("west") == ["--simulate", "sites", "--target", "west", *said.words]
