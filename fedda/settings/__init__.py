"""Put a run's settings together: those of the operator, those sent to sites, and presets."""

from .run_config import RunConfig, defaults, lasting, overrides
from .task import Task

__all__ = ["RunConfig", "Task", "defaults", "lasting", "overrides"]
