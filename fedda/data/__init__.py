"""The data a site brings: read, checked, brought to one shape and shown."""

from fedda.data.batchwise import batches
from fedda.data.cache import Cache
from fedda.data.folder_of_sites import domains, passed_over
from fedda.data.form import Reading, Resize, conform
from fedda.data.load import (
    describe,
    identities,
    keys,
    leaks,
    load_evaluation,
    load_source,
    load_target,
    names,
    shared,
    state_of,
    verify,
)
from fedda.data.reader import Reader
from fedda.data.sets import Description, Examples, Labelled, Role, Unlabelled, align, poison

__all__ = [
    "Cache",
    "Description",
    "Examples",
    "Labelled",
    "Reader",
    "Reading",
    "Resize",
    "Role",
    "Unlabelled",
    "align",
    "batches",
    "conform",
    "describe",
    "domains",
    "identities",
    "keys",
    "leaks",
    "load_evaluation",
    "load_source",
    "load_target",
    "names",
    "passed_over",
    "poison",
    "shared",
    "state_of",
    "verify",
]
