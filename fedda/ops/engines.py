"""What a simulation runs on: this process, or Flower's simulation engine, which is an extra."""

from importlib.util import find_spec

from fedda.errors import ConfigError


def check_engine(engine: str) -> None:
    """Refuse an engine that is not installed.

    Raises:
        ConfigError: `ray` was asked for, and the package of that name is missing.
    """
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError(
            "--engine ray is Flower's simulation engine, which needs the package ray: pip install "
            '"fedda[simulation]", or leave out --engine.'
        )
