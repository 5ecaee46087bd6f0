"""What a run changes in its process, put back after it."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedda.halves import load
from fedda.models.arithmetic import plain_modes

_LOGGERS = ("flwr", "fedda", "fedda.site", "fedda.server", "torch.onnx")


@contextmanager
def unchanged() -> Iterator[None]:
    """Leave environment, logging, random generators and torch's settings as they were found.

    Simulated sites also stay in this process's memory, with their data; they are forgotten.
    """
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in loggers]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    threads = torch.get_num_threads()
    cudnn: Any = torch.backends.cudnn
    chosen = cudnn.deterministic, cudnn.benchmark
    try:
        with load("server", "simulation").identity(), plain_modes():
            yield
    finally:
        load("clients", "site.memory").resident.cache_clear()
        cudnn.deterministic, cudnn.benchmark = chosen
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for each, level, propagate, handlers in before:
            each.setLevel(level)
            each.propagate, each.handlers = propagate, handlers
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
