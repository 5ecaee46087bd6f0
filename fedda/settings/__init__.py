"""Put a run's settings together: those of the operator, those sent to sites, and presets."""

from .run_config import RunConfig, as_keyword, defaults, lasting, named, overrides, seeds_of
from .task import Task

__all__ = [
    "RunConfig",
    "Task",
    "as_keyword",
    "defaults",
    "lasting",
    "named",
    "overrides",
    "seeds_of",
]
