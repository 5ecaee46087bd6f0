"""Methods that sum gradients, in all kinds of runs: what is refused before a run begins."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedda.errors import ConfigError, RunError
from fedda.exchange import in_process
from fedda.settings import RunConfig
from server import run as server_run
from server import simulation
from server.journal import Journal
from server.simulation import rehearse, simulate
from tests.local_grid import FAST, SMALL_SUMS, Node, ScriptedGrid

ROOT = Path(__file__).parents[1]
DILS: dict[str, Any] = (
    FAST
    | {
        "method": "dils",
        "rounds": 3,
        "run.name": "pair",
        "dils.pretrain": 1,
        "dils.epochs": 1,
        "dils.discriminator.sizes": "8",
        "track.tensorboard": False,
    }
    | SMALL_SUMS
)


# ---- before anything begins --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"3 sources have joined; set dils\.collaborator to one of anna, bert, carl"),
        ({"dils.collaborator": "town"}, r"'town' is no source; .* anna, bert, carl"),
        ({"dils.collaborator": "anna", "exchange.p": 4}, r"exchange\.p is 4, more than the steps"),
        (
            {"dils.collaborator": "anna", "dils.pretrain": 3},
            r"no gradients in its first 3 rounds, and rounds is 3, .* or lower dils\.pretrain",
        ),
        ({"method": "fdan", "rounds": 1}, r"no gradients in its first 1 rounds, and rounds is 1,"),
        (
            {"dils.collaborator": "bert", "exchange.min-examples": 49, "train.batch-size": 50},
            r"only over 49 examples \(exchange\.min-examples\), but town has 48 in all; give them",
        ),
        ({"method": "fdann", "exchange.min-examples": 49, "exchange.p": 4}, "nothing to align"),
        ({"method": "fdan", "exchange.min-examples": 49, "exchange.p": 4}, "nothing to align"),
        # This is refused whichever source the first round draws.
        (
            {
                "method": "fdann",
                "exchange.min-examples": 49,
                "exchange.p": 4,
                "sources-per-round": 1,
                "run.seeds": "3,4,5",
            },
            "nothing to align",
        ),
    ],
)
def test_a_run_that_would_fail_is_refused_before_its_first_round(
    domains: list[Node], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """Also before the baseline's rounds: in a simulation, and once sites have answered a server."""
    flat = DILS | {"run.baseline": "fedavg", "run.dir": str(tmp_path)} | settings
    config = RunConfig.parse(flat)
    with pytest.raises(ConfigError, match=message):
        rehearse(config, domains)
    events: list[dict[str, Any]] = []
    with pytest.raises(ConfigError, match=message):
        server_run.execute(config, ScriptedGrid(domains), Journal(None, events.append))
    assert "roster" in {e["event"] for e in events}
    assert not [e for e in events if e["event"] in ("training", "round")]


@pytest.mark.parametrize(
    ("method", "settings"), [("dils", {"dils.collaborator": "carl"}), ("fdann", {}), ("fdan", {})]
)
def test_a_valid_run_passes_the_rehearsal_and_leaves_no_session(
    domains: list[Node], method: str, settings: dict[str, Any]
) -> None:
    before = set(in_process._sessions)  # left by tests that run single rounds
    rehearse(RunConfig.parse(DILS | {"method": method} | settings), domains)
    assert set(in_process._sessions) == before


@pytest.mark.parametrize(
    ("method", "settings", "needed"),
    [
        ("dils", {"dils.collaborator": "anna"}, 2),
        ("fdann", {}, 4),
        ("fdann", {"sources-per-round": 2}, 3),
        ("fdan", {}, 4),
    ],
)
def test_a_simulation_needs_a_slot_for_each_site_that_sums(
    domains: list[Node], tmp_path: Path, method: str, settings: dict[str, Any], needed: int
) -> None:
    flat = DILS | {"method": method, "run.dir": str(tmp_path), "rounds": 2} | settings
    config, grid = RunConfig.parse(flat), ScriptedGrid(domains)
    message = f"{method} sums gradients of {needed} sites .* room for {needed - 1}, .*process"
    with pytest.raises(RunError, match=message):
        server_run.execute(config, grid, Journal(), lambda: needed - 1)
    assert {crossing.kind for crossing in grid.crossed} == {"query"}
    server_run.execute(config, grid, Journal(), lambda: needed)
    server_run.execute(
        RunConfig.parse(FAST | {"method": "fedavg", "run.dir": str(tmp_path), "run.name": "one"}),
        grid,
        Journal(),
        lambda: 1,
    )


# ---- Ray -----------------------------------------------------------------------------------------

# This runs in its own process, because Flower supports one simulation per process.
ON_RAY = """
import json, sys
import ray
from fedda.settings import RunConfig
from server.journal import Journal
from server.simulation import simulate

flat, sites = json.loads(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False)
simulate(RunConfig.parse(flat), sites, Journal(), "ray")
"""


def on_ray(flat: dict[str, Any], sites: list[Node]) -> None:
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, json.dumps([flat, sites])],
        env=os.environ | {"PYTHONPATH": python, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly(
    *("clients/site/identity.py", "fedda/exchange", "fedda/ops/engines.py", "server/simulation.py")
)
def test_on_ray_sites_sum_gradients_and_hide_models_as_in_one_process(
    domains: list[Node], tmp_path: Path
) -> None:
    """A site's requests are served by any process, so its key cannot lie in one's memory."""
    slow = {"wait.sites": 120.0, "wait.train": 90.0, "wait.evaluate": 90.0, "exchange.join": 90.0}
    hidden = {"run.baseline": "kd3a", "kd3a.relay": "sealed"}
    sites = [node | {"threads": 1} for node in domains]
    kept: list[dict[str, Any]] = []
    for engine in ("ray", "process"):
        root = tmp_path / engine / "pair"
        flat = DILS | slow | hidden | {"run.dir": str(root.parent), "exchange.p": 2}
        flat["dils.collaborator"] = "anna"
        if engine == "ray":
            on_ray(flat, sites)
        else:
            simulate(RunConfig.parse(flat), sites, Journal(), "process")
        results = json.loads((root / "results.json").read_text())
        assert results["events"] == []
        (dils,), (kd3a,) = (results["trainings"][method] for method in ("dils", "kd3a"))
        assert len({k for k in dils["bytes"] if "gradient" in k}) == 4
        assert kd3a["hidden"] == "sealed" and list((root / "sites").rglob("*.key")) == []
        kept.append(load_file(kd3a["model"]))
        for site in ("anna", "town"):
            held = load_file(root / "sites" / site / "pair.dils-0.3.method.safetensors")
            kept[-1] |= {f"{site}/{name}": tensor for name, tensor in held.items()}
    ray, process = kept
    assert ray.keys() == process.keys()
    assert all(ray[name].equal(process[name]) for name in ray)


# ---- Flower's own node ---------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_stops_a_run_on_ray_also_where_ctrl_c_is_ignored(
    signal_handlers: None, ignored: bool
) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with simulation._noting_ctrl_c() as stopped:
        if ignored:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stopped.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == ignored
