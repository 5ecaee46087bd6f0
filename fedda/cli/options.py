"""Options of a command that are not written down in it: from settings, or of several commands."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from fedda.config.sections import Section

# By name: the annotation, with its `typer.Option`, and the default.
Options = dict[str, tuple[Any, Any]]
Command = Callable[..., None]


def of_section(section: type[Section], shown: Mapping[str, Mapping[str, Any]]) -> Options:
    """The options that set a section's settings: their types, bounds, defaults and texts.

    Args:
        section: the settings.
        shown: what else `typer.Option` is told of some of them.
    """
    options: Options = {}
    for name, field in section.model_fields.items():
        bounds = {type(each).__name__: each for each in field.metadata}
        least, most = (getattr(bounds.get(n), n.lower(), None) for n in ("Ge", "Le"))
        flag = [f"--{field.alias}"] if field.annotation is bool else []
        more = {"show_default": field.default not in (None, ""), **shown.get(name, {})}
        option = typer.Option(*flag, help=field.description, min=least, max=most, **more)
        default = inspect.Parameter.empty if field.is_required() else field.default
        options[name] = Annotated[field.annotation, option], default  # type: ignore[valid-type]
    return options


def given(
    whole_of: str, options: Options, make: Callable[..., Any]
) -> Callable[[Command], Command]:
    """Give a command options in place of one parameter, which gets what `make` makes of them."""

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def whole(**all_given: Any) -> None:
            made = make(**{name: all_given.pop(name) for name in options})
            command(**all_given, **{whole_of: made})

        kind, parameters = inspect.Parameter.KEYWORD_ONLY, list[inspect.Parameter]()
        for each in inspect.signature(command).parameters.values():
            if each.name == whole_of:
                for name, (option, default) in options.items():
                    parameters.append(
                        inspect.Parameter(name, kind, default=default, annotation=option)
                    )
            else:
                parameters.append(each.replace(kind=kind))
        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {each.name: each.annotation for each in parameters}
        return whole

    return decorated
