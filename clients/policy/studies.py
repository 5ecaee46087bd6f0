"""A policy's studies: each `[study.NAME]` lists one, with rules in place of the general ones.

A site decides by its own file what a study may do. With any study listed it takes part in no other
run, so nobody gets fresh budgets by a new name. What a study's tables leave out holds as the file
says it for all. Some keys hold for the whole site, as one program serves all studies, on one
division of the images.
"""

from collections.abc import Mapping
from typing import Any

from fedda.config import study_name

STUDY = "study"
DIVIDED = "images are divided into blocks once, and two divisions would show where they differ"
# Keys that hold for the whole site, and why.
WHOLE = {
    "allow.plugins": "other packages' code is loaded once",
    "protect.min-images": DIVIDED,
    "protect.min-examples": DIVIDED,
    "audit": "an audit is of the site's data, for whatever study",
    STUDY: "a study has no studies",
}


def spread(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill each study's tables with what they leave out -> the whole file.

    Args:
        tree: the file's tables, whose keys are known.

    Raises:
        ValueError: a study is no table, its name is none, or a key of it holds for the whole site.
    """
    general = {name: table for name, table in tree.items() if name != STUDY}
    studies = _table(tree.get(STUDY, {}), STUDY)
    for study, own in studies.items():
        study_name(study or "-")
        for name in _table(own, f"{STUDY}.{study}"):
            keys = [
                name,
                *(f"{name}.{key}" for key in _table(own[name], f"{STUDY}.{study}.{name}")),
            ]
            if whole := next((key for key in keys if key in WHOLE), ""):
                raise ValueError(
                    f"{STUDY}.{study}.{whole} is for the whole site, as {WHOLE[whole]}"
                )
    if not studies:
        return general
    base = {name: _table(table, name) for name, table in general.items()}
    return general | {STUDY: {study: _over(base, own) for study, own in studies.items()}}


def _over(general: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The general tables, with a study's own keys in place of theirs."""
    return {n: {**general.get(n, {}), **own.get(n, {})} for n in {**general, **own}}


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, which is no table: write [{name}]")
    return value
