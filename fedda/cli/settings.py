"""`fedda methods` and `fedda settings`: list methods, settings and presets."""

from typing import Annotated, get_args

import typer
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from fedda import plugins
from fedda.cli import wire_table
from fedda.cli.as_json import JsonOption, print_json
from fedda.config import DEFAULT
from fedda.errors import typed
from fedda.results.escaping import PlainConsole, echo
from fedda.settings import RunConfig, presets


def methods(
    wire: Annotated[bool, typer.Option("--wire")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods that `fedda run` knows.

    Options:
        wire: Show instead what may enter and leave a site, as the code checks it.
    """
    if wire:
        return echo(wire_table.table())
    unfinished = plugins.unfinished()
    if as_json:
        whole = {*plugins.methods()} - {each.name for each in unfinished}
        about = {n: {"about": plugins.about(n), "of": plugins.origin(n)} for n in sorted(whole)}
        left_out = [str(each) for each in [*plugins.broken(), *unfinished]]
        return print_json({"methods": about, "left_out": left_out})
    for name in sorted({*plugins.methods()} - {each.name for each in unfinished}):
        echo(f"{name:10} {plugins.about(name)}{_from(plugins.origin(name))}")
    _show_added("models", "networks that other packages add, for model.name:")
    _show_added("data", "readers that other packages add, for --data:")
    _show_added("augment", "augmentations that other packages add, for train.augment:")
    _show_added("commands", "commands that other packages add:")
    _show_added("listeners", "what other packages do once a run has ended:")
    for each in [*plugins.broken(), *unfinished]:
        echo(str(each), err=True)


def settings(
    method: Annotated[str, typer.Argument(help="Show this method's own settings too.")] = DEFAULT,
    show: Annotated[
        bool, typer.Option("--presets", help="List the presets instead, with their sources.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List every setting, its default and what it means.

    Set one with `fedda run METHOD -c key=value`, many with `--preset NAME`.
    """
    chosen = plugins.method(method)
    listed = [*rows(RunConfig), *rows(chosen.config, f"{method}.")]
    if as_json:
        known = {key: {"default": value, "about": about} for key, value, about in listed}
        named = {
            name: {key: {"value": value, "source": of} for key, (value, of) in each.items()}
            for name, each in presets.table(method).items()
        }
        return print_json({"settings": known, "presets": named})
    if show:
        return _presets(method)
    table = Table("setting", "default", "meaning")
    for key, default, about in listed:
        table.add_row(key, escape(str(default)), escape(about))
    PlainConsole().print(table)
    if plugins.origin(method) != plugins.OWN:
        echo(f"{method} is added by {plugins.origin(method)}.")
    _show_added("models", "model.name may also be:")
    _show_added("data", "--data may also be what these readers take:")
    _show_added("augment", "train.augment may also be:")
    for each in plugins.broken():
        echo(str(each), err=True)
    echo(f"--preset: {', '.join(presets.names(method))}; see --presets")


def _show_added(group: plugins.Group, title: str) -> None:
    """Print what other packages add to a group, and which packages; nothing if none does."""
    added = [each for each in plugins.installed(group).values() if each.origin != plugins.OWN]
    if added:
        echo(f"\n{title}")
    for each in added:
        echo(f"{each.name:10} {each.about}{_from(each.origin)}")


def _from(origin: str) -> str:
    return "" if origin == plugins.OWN else f" ({origin})"


def _presets(method: str) -> None:
    """Print the method's own presets, then the benchmarks'."""
    for name, preset in presets.table(method).items():
        table = Table(box=None, title=f"--preset {name}", title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for key, (value, source) in sorted(preset.items()):
            table.add_row(key, escape(str(value)) or "''", escape(source))
        PlainConsole().print(table, "")
    echo(
        f"{typed('fedda', 'run', method, '--preset', 'NAME')}: it may be given more than once, the "
        "last wins, and -c key=value wins over all."
    )


def rows(section: type[BaseModel], prefix: str = "") -> list[tuple[str, object, str]]:
    """Every setting of a section -> dotted key, default, meaning."""
    found: list[tuple[str, object, str]] = []
    for name, field in section.model_fields.items():
        key = f"{prefix}{name.replace('_', '-')}"
        if isinstance(field.default, BaseModel):
            found += rows(type(field.default), f"{key}.")
        elif not field.exclude:
            choices = [str(c) for c in get_args(field.annotation)]
            among = f" ({', '.join(choices)})" if choices else ""
            found.append((key, field.default, f"{field.description or ''}{among}"))
    return found
