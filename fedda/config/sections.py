"""Groups of settings, as nested tables and as one flat table with dotted keys."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from fedda.errors import ConfigError

Scalar = bool | int | float | str
Flat = dict[str, Scalar]
S = TypeVar("S", bound=BaseModel)


class Section(BaseModel):
    """A frozen group of settings; unknown keys are refused.

    The text below a setting, or `description` of its Field, says what it means; `SEE` names the
    place that lists all.
    """

    SEE: ClassVar[str] = "; see fedda settings"

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Join the lines of each setting's text."""
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            if field.description:
                field.description = " ".join(field.description.split())

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float):
            raise ValueError("Input should be a number")
        return value

    def flat(self) -> Flat:
        """Every setting under its dotted key."""
        return flatten(self.model_dump(by_alias=True))


def validate(section: type[S], tree: Any, prefix: str = "") -> S:
    """Build a section; turn pydantic's report of an error into one sentence.

    What a part of it lacks comes from the section's default of this part, not from its class.
    """
    try:
        return section.model_validate(_with_defaults(section, tree))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([prefix, *map(str, first["loc"])]).lstrip(".")
        see = getattr(section, "SEE", "")
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"There is no setting '{key}'{see}.") from None
        if first["type"] == "missing":
            raise ConfigError(f"The setting '{key}' is missing.") from None
        reason = first["msg"].removeprefix("Value error, ")  # of our own checks
        if first["type"] == "string_pattern_mismatch":  # nobody need read a pattern
            reason = _meaning(section, first["loc"]) or reason
        raise ConfigError(
            f"{key} is {first['input']!r}, which cannot be: {reason.rstrip('.')}."
        ) from None


def _meaning(section: Any, place: tuple[int | str, ...]) -> str:
    """What a setting should be, by its text; empty if it has none."""
    text: str | None = ""
    for name in place:
        fields = getattr(section, "model_fields", {})
        for key, field in fields.items():
            if name in (key, field.alias):
                section, text = field.annotation, field.description
    return f"needed is {text}" if text else ""


def _with_defaults(section: type[S], tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    whole = dict(tree)
    for name, field in section.model_fields.items():
        key = field.alias or name
        if isinstance(field.default, Section) and isinstance(whole.get(key), Mapping):
            whole[key] = field.default.model_dump(by_alias=True) | dict(whole[key])
    return whole


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Flat:
    """Turn nested tables into one table with dotted keys."""
    flat: Flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn one table with dotted keys into nested tables."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"'{key}' is given beside a value for '{part}' itself.")
        if leaf in node:
            raise ConfigError(f"'{key}' is given beside values for keys below it.")
        node[leaf] = value
    return tree
