"""`fedda new`: a study that runs as it is written."""

import runpy
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from fedda.cli.helped import joined
from tests.command_lines import call
from tests.local_grid import make_domains


def begun(folder: Path, *words: str, code: int = 0) -> str:
    return call("new", folder, *words, code=code).output


def test_a_study_of_ones_own_data_runs_as_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signal_handlers: None,
) -> None:
    sites = tmp_path / 'all "sites"'
    sites.mkdir()
    make_domains(sites)
    folder = tmp_path / "with spaces" / "study"
    said = begun(folder, "--data", str(sites), "--target", "town", "--preset", "vectors")
    assert f"cd {shlex.quote(str(folder))} && python study.py" in said.replace("\n", "")
    study = folder / "study.toml"
    settings = tomllib.loads(study.read_text())
    assert settings["target"] == "town" and settings["sites"] == str(sites)
    typed = [shlex.split(line) for line in (folder / "README.md").read_text().split("\n    ")]
    assert [words[3] for words in typed if words[:2] == ["fedda", "choose"]] == [str(sites)]
    text = study.read_text().replace('"rounds" = 10', '"rounds" = 1\n"train.batch-size" = 16')
    study.write_text(text.replace('"vectors"', '""').replace('["adabn", "kd3a"]', '["fedprox"]'))
    monkeypatch.chdir(folder)
    runpy.run_path("study.py", run_name="__main__")
    assert (
        "FedProx on town" in capsys.readouterr().out
        and (folder / "runs" / "comparison.md").exists()
    )


def test_the_digits_come_with_a_study(tmp_path: Path) -> None:
    begun(tmp_path / "study")
    settings = tomllib.loads((tmp_path / "study" / "study.toml").read_text())
    assert settings["settings"]["input.size"] == 16 and settings["target"] == "fonts"
    assert settings["methods"] == ["adabn", "kd3a:paper"], "as the demo, so that it gains as much"
    sites = tmp_path / "study" / "sites"
    assert {p.name for p in sites.iterdir()} == {"blended", "fonts", "handwritten", "street"}
    readme = (tmp_path / "study" / "README.md").read_text()
    assert "fedda choose --data sites --target fonts -c input.size=16" in readme


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--target", "nowhere"], "none of its sites; give --target as one of anna, bert"),
        ([], "--target names no site; give"),
        (["--target", "town", "--preset", "fotos"], "photos"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_made(
    tmp_path: Path, words: list[str], why: str
) -> None:
    make_domains(tmp_path)
    said = begun(tmp_path / "new", "--data", str(tmp_path), *words, code=1)
    assert why in " ".join(said.split()) and not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    assert "exists; give the name of a folder" in begun(tmp_path, code=1)
    assert not list(tmp_path.iterdir())


def test_paragraphs_of_help_are_joined_and_examples_kept() -> None:
    assert joined("A\n    b.\n\n      fedda run\n\n    C\n    d.") == "A b.\n\n  fedda run\n\nC d."


def test_a_methods_package_is_what_the_page_shows_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun(Path("method"), "norms")
    package = tmp_path / "fedda_norms" / "fedda_norms"
    pyproject = (package.parent / "pyproject.toml").read_text()
    page = (Path(__file__).parents[3] / "docs" / "first-method.md").read_text()
    assert f"# pyproject.toml\n{pyproject}```" in page
    assert tomllib.loads(pyproject)["project"]["name"] == "fedda-norms"
    monkeypatch.syspath_prepend(package.parent)
    halves = {part: import_module(f"fedda_norms.{part}") for part in ("client", "strategy")}
    assert halves["client"].Source and halves["strategy"].STRATEGY
    assert import_module("fedda_norms.algorithm").METHOD.name == "norms"
    for odd in ("norms", "kd3a", "My Method", "a/b"):
        begun(Path("method"), odd, code=1)
    begun(Path("study"), "norms", code=1)
    assert "to begin a method: fedda new method NAME" in begun(Path("method"), code=1)
