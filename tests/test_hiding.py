"""Runs hide single models by themselves where every site can: when, and that it is said."""

from typing import Any

import pytest

from fedda.settings import RunConfig


def hiding(sources: int = 3, **settings: Any) -> RunConfig:
    return RunConfig.parse({k.replace("__", "."): v for k, v in settings.items()}).hiding(sources)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "adabn", "fedbn", "autodial", "centring"])
def test_means_become_secure_sums(method: str) -> None:
    assert hiding(method=method).secure_of(method) == "sum"
    assert RunConfig.parse({"method": method}).secure_of(method) == "none"  # without keys
    assert hiding(method=method, secure="none").secure_of(method) == "none"
    assert hiding(2, method=method).secure_of(method) == "none"
    assert hiding(method=method, guard__mean="median").secure_of(method) == "none"
    assert hiding(method=method, **{"sources-per-round": 3}).secure_of(method) == "none"


def test_kd3a_is_sealed_and_its_baseline_summed() -> None:
    config = hiding(method="kd3a", run__baseline="fedavg")
    assert config.options["kd3a"].relay == "sealed" and config.secure_of("kd3a") == "none"
    assert config.secure_of("fedavg") == "sum"
    assert hiding(method="kd3a", kd3a__relay="open").options["kd3a"].relay == "open"
    local = hiding(method="kd3a", kd3a__heads="local")  # the server needs each source's head
    assert local.options["kd3a"].relay == "auto"
    assert "sealed" not in str(hiding(method="fada").flat().get("fada", ""))
