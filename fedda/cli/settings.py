"""`fedda methods` and `fedda settings`: what there is to choose."""

from typing import Annotated, get_args

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedda import config
from fedda.cli.exits import clear_exit


def methods() -> None:
    """List the methods that `fedda run` knows."""
    for name in config.methods():
        about = (config.method_module(name).__doc__ or "").splitlines()[0]
        typer.echo(f"{name:10} {about}")


def settings(
    method: Annotated[str, typer.Argument(help="Show this method's own settings too.")] = "kd3a",
) -> None:
    """List every setting, its default and what it means.

    Set one with `fedda run METHOD -c key=value`.
    """
    with clear_exit():
        module = config.method_module(method)
        table = Table("setting", "default", "meaning")
        for key, default, about in [*_rows(config.RunConfig), *_rows(module.Config)]:
            table.add_row(key, escape(str(default)), escape(about))
        Console().print(table)
        for name, preset in module.PRESETS.items():
            pairs = ", ".join(f"{k}={v}" for k, v in preset.items())
            typer.echo(f"--preset {name}: {pairs}")


def _rows(section: type[BaseModel], prefix: str = "") -> list[tuple[str, object, str]]:
    rows = []
    for name, field in section.model_fields.items():
        key = f"{prefix}{name.replace('_', '-')}"
        if isinstance(field.default, BaseModel):
            rows += _rows(type(field.default), f"{key}.")
        elif not field.exclude:
            choices = [str(c) for c in get_args(field.annotation)]
            among = f" ({', '.join(choices)})" if choices else ""
            rows.append((key, field.default, f"{field.description or ''}{among}"))
    return rows
