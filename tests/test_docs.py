"""The README has no placeholders, and every file that it names exists."""

import re
from pathlib import Path

import pytest

from fedda import plugins
from fedda.cli import wire_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md"]
PAGES += ["examples/benchmarks/results/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_no_placeholder_is_left(page: str) -> None:
    assert not re.findall(r"@[A-Z]+@|TODO|FIXME|XXX", (ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    gone = [link for link in links if not (path.parent / link).exists()]
    assert not gone


def test_files_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"\b((?:fedda|clients|strategies|server|examples|tests)/[\w/]+\.py)", text)
    assert len(named) > 8
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_wire_table_of_the_readme_matches_the_contracts() -> None:
    """Renew it with `fedda methods --wire`."""
    table = wire_table.table()
    assert table in (ROOT / "README.md").read_text()
    assert all(
        any(method in line.split("|")[1] for line in table.splitlines())
        for method in plugins.methods()
    )


def test_optional_content_is_in_brackets() -> None:
    (fedavg,) = [c for c in wire_table.of_method("fedavg") if c.when == "train"]
    assert fedavg == ("source", "train", "`model`", "`model`; `loss, seconds, steps`")
    dils = {c.part: c for c in wire_table.of_method("dils") if c.when == "adapt"}
    assert dils["target"].leaves.startswith("[`model`]; ")
    assert dils["target"].leaves.endswith("; sums of gradients: `discriminator`")
    assert dils["collaborator"]._replace(part="target") == dils["target"]


def test_each_phase_of_a_method_has_its_own_lines() -> None:
    found = {(c.part, c.when): c for c in wire_table.of_method("dils")}
    assert set(found) == {
        ("collaborator", "pretrain: train"),
        *((part, "adapt") for part in ("collaborator", "target")),
        ("target", "adapt: take"),  # the last classifier of `cada`
        *(("target", f"{phase}: test") for phase in ("pretrain", "adapt")),
        ("collaborator", "last round: calibrate"),
    }
    thresholds = "`threshold-confidence/*, threshold-entropy/*`"
    assert found["target", "pretrain: test"].enters == f"`model`; {thresholds}"
    assert found["target", "adapt: test"].enters == thresholds  # the target tests its own model
    # Phases with the same test share a line.
    assert [c.when for c in wire_table.of_method("fdan") if "test" in c.when] == ["test"]
