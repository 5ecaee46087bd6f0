"""Put a run's settings together: those of the operator, those sent to sites, and presets."""

from .given import as_arguments, as_keyword, named, overrides, seeds_of
from .run_config import RunConfig, defaults, lasting
from .task import Task

__all__ = [
    "RunConfig",
    "Task",
    "as_arguments",
    "as_keyword",
    "defaults",
    "lasting",
    "named",
    "overrides",
    "seeds_of",
]
