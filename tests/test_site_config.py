"""A site's settings: read from a flat table, refused in a sentence, and the client's options."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clients.site.memory import Site
from fedda.cli.client import app as client_command
from fedda.config.site_config import SiteConfig, SiteOptions
from fedda.errors import ConfigError

LEAST = {"role": "source", "data": "scans"}


def test_a_table_holds_what_was_given_and_nothing_else() -> None:
    given = LEAST | {"min-images": 20, "weights": "w.pt", "peers": "", "reproducible": True}
    config = SiteConfig.parse(given)
    assert config.min_examples == 256  # of a gradient, unless the site says otherwise
    assert config.data == Path.cwd() / "scans" and config.peers is None
    assert config.table() == {
        "role": "source",
        "data": str(Path.cwd() / "scans"),
        "min-images": 20,
        "weights": str(Path.cwd() / "w.pt"),
        "reproducible": True,
    }
    assert SiteConfig.parse(config.table()) == config


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"min-image": 64}, "There is no setting 'min-image' of a site; see fedda-client --help."),
        ({"poison": 101}, "poison is 101, which cannot be: Input should be less than or equal"),
        ({"noise": "much"}, "noise is 'much', which cannot be: Input should be a valid number"),
        ({"cache": "tape"}, "cache is 'tape', which cannot be: Input should be 'auto'"),
        ({"role": "both"}, "role is 'both', which cannot be: Input should be 'source' or"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(node: dict[str, Any], text: str) -> None:
    """A limit that is misspelt would else be none."""
    with pytest.raises(ConfigError, match=f"^{text}"):
        Site(LEAST | node)


def test_a_setting_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^The setting 'data' is missing"):
        Site({"role": "source"})


def test_each_setting_of_an_operator_is_an_option_with_a_text() -> None:
    command = typer.main.get_command(client_command)
    options = {option.name: option for option in command.params}
    for name, field in SiteOptions.model_fields.items():
        assert field.description and options[name].help == field.description  # type: ignore[attr-defined]
        assert f"--{name.replace('_', '-')}" in options[name].opts
    words = ["--role", "source", "--data", "x", "--superlink", "a:1", "--insecure", "--noise"]
    result = CliRunner().invoke(client_command, [*words, "nan"])
    assert result.exit_code and "noise is nan, which cannot be" in result.output
