"""Settings as people give them: texts on a command line, and names in a program."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedda import plugins
from fedda.config import sections
from fedda.errors import ConfigError

from .run_config import defaults

_QUOTE = "'\"'\"'"  # as a shell takes one inside of quotes
_OPTION = re.compile(
    rf"-c '([\w.-]+)=((?:[^']|{_QUOTE})*)'|"
    r"-c ([\w.-]+)=([^\s;)]*\w)|--(columns) ([^\s;)]*\w)(?![\w=])|"
    r"--(rounds|gray-bits|threads) (\d+)|--(preset|engine) (photos|vectors|table|process|ray)\b"
)
_BARE = re.compile(
    r"(?:fedda run )?--(resume)(?: /\S*\w)?|--(skip-broken|follow-links|name|dir|split|target|"
    r"gray-bits|engine|threads|poison|teacher|start-from|seeds|preset|rounds)\b"
)


def overrides(method: str, pairs: list[str]) -> sections.Flat:
    """Read `key=value` texts -> dotted keys; keys of the method need no `METHOD.` before them.

    Raises:
        ConfigError: a text has no `=`, or a key does not exist (the nearest keys are named).
    """
    known, given = defaults(), {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"'{pair}' is not a setting; write it as key=value.")
        full = next((k for k in (key, f"{method}.{key}") if k in known), None)
        if full is None:
            raise _unknown(key, method, known)
        given[full] = _read(full, text, known[full])
    return given


def seeds_of(text: str) -> list[int]:
    """The seeds that a text means: "3" is 0, 1, 2; "5,6" is 5, 6; "7," is 7.

    Raises:
        ConfigError: it means none.
    """
    try:
        seeds = [int(s) for s in text.split(",") if s.strip()]
    except ValueError:
        seeds = []
    if "," not in text:
        seeds = list(range(sum(seeds)))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"--seeds '{text}' is not valid; give their number, such as 3 for 0, 1 and 2, or "
            "different seeds with commas, such as 5,6 (or 7, for one)."
        )
    return seeds


def named(method: str, values: Mapping[str, Any]) -> sections.Flat:
    """Settings by their names in a program -> dotted keys.

    Args:
        method: its own settings need no `METHOD.` before them.
        values: by dotted name, or with `_` in place of every `.` and `-`: no two settings are then
            called the same. A list or tuple becomes a text with commas.

    Raises:
        ConfigError: there is no such setting (the nearest are named), or it is given twice.
    """
    known, given = defaults(), {}
    plain = {as_keyword(key): key for key in known}
    for name, value in values.items():
        keys = (name, f"{method}.{name}")
        keyword = (plain.get(as_keyword(key)) for key in keys if "." not in name)
        full = next((k for k in (*keys, *keyword) if k in known), None)
        if full is None:
            raise _unknown(name, method, known)
        if full in given:
            raise ConfigError(f"'{full}' is given twice, also as '{name}'; give it once.")
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        if not isinstance(value, sections.Scalar):  # such as numpy's numbers
            value = value.item() if hasattr(value, "item") else str(value)
        given[full] = value
    return given


def as_keyword(key: str) -> str:
    """A setting's name as an argument of a Python function: `train.lr-end` is `train_lr_end`."""
    return key.replace(".", "_").replace("-", "_")


def as_arguments(text: str) -> str:
    """A text with a command line's settings as a function's: `-c train.lr=.1` is `train_lr=.1`."""
    return _BARE.sub(_as_keyword, _OPTION.sub(_as_argument, text))


def _as_keyword(option: re.Match[str]) -> str:
    name = as_keyword(option[1] or option[2])
    plain = {"name": "dir"}.get(name, name)
    return f"{plain}=True" if name in ("resume", "skip_broken", "follow_links") else plain


def _as_argument(option: re.Match[str]) -> str:
    key, value = (part for part in option.groups() if part is not None)
    value = value.replace(_QUOTE, "'")
    value = {"true": "True", "false": "False"}.get(value, value)
    plain = value in ("True", "False") or re.fullmatch(r"[\d.e+-]+", value)
    return f"{as_keyword(key)}={value if plain else json.dumps(value, ensure_ascii=False)}"


def _unknown(key: str, method: str, known: Mapping[str, sections.Scalar]) -> ConfigError:
    own = f"{method}."
    near = _near(key.removeprefix(own), [k.removeprefix(own) for k in known])
    hint = f"; did you mean {' or '.join(near)}?" if near else "; see fedda settings."
    return ConfigError(f"There is no setting '{key}'{hint}")


def _near(key: str, known: Sequence[str]) -> list[str]:
    """Up to three keys that may have been meant: those that end in the key come first."""
    others = tuple(f"{method}." for method in plugins.methods())
    ends = [k for k in known if k.endswith(f".{key}")]
    ends = [k for k in ends if not k.startswith(others)] or ends
    alike = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return list(dict.fromkeys([*ends, *alike]))[:3]


def _read(key: str, text: str, like: sections.Scalar) -> sections.Scalar:
    """Convert a text to the type of the key's default."""
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key} is '{text}', but must be true or false.")
        return text.lower() == "true"
    if isinstance(like, int | float):
        try:
            return type(like)(text)
        except ValueError:
            kind = "a whole number" if isinstance(like, int) else "a number"
            raise ConfigError(f"{key} is '{text}', but must be {kind}.") from None
    return text
