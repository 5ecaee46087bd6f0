"""A run's settings put together: what an operator decides, what a site is told, presets."""

from .run_config import RunConfig, defaults, lasting, overrides
from .task import Task

__all__ = ["RunConfig", "Task", "defaults", "lasting", "overrides"]
