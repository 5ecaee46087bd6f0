"""Importing the literature's benchmarks: their authors' files become one folder per site."""

from fedda.data.benchmarks.common import Benchmark, Options
from fedda.data.benchmarks.registry import BENCHMARKS, import_benchmark
from fedda.data.benchmarks.write import Result

__all__ = ["BENCHMARKS", "Benchmark", "Options", "Result", "import_benchmark"]
