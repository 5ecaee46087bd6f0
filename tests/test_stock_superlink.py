"""Runs on Flower's own SuperLink: over lanes at a port of theirs, and by its own SuperNodes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fedda.ops.spawn import quiet_port
from fedda.settings import RunConfig
from server.journal import Journal
from server.simulation import simulate
from tests import test_walkthroughs
from tests.federation import LIVE, MIN_IMAGES, final_model
from tests.local_grid import make_domains
from tests.patience import PATIENCE, wait_until
from tests.test_walkthroughs import Terminals, answers

pytestmark = pytest.mark.nightly(
    *("clients/app.py", "clients/node", "fedda/cli/client.py", "fedda/flower", "fedda/lane"),
    *("server/app.py", "server/lane_grid.py"),
)
terminals = test_walkthroughs.terminals

ROUND = {"rounds": 1, "run.evaluate": False}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (
            {"method": "fdann", "exchange.min-examples": 1, "exchange.expose-features": True},
            "",
        ),  # gradients are summed on streams
        ({"method": "kd3a", "run.transport": "flower"}, "--stock"),
    ],
)
def test_a_run_gives_what_it_gives_in_one_process(
    terminals: Terminals, tmp_path: Path, settings: dict[str, Any], more: str
) -> None:
    nodes = make_domains(tmp_path)[::3]  # a source and the target
    port = quiet_port()
    alone = tmp_path / "alone"
    flat = LIVE | ROUND | settings | {"run.dir": str(alone), "run.name": "run"}
    flat["run.expect"] = len(nodes)
    own = {"state-dir": str(alone), "threads": 1, "min-images": MIN_IMAGES}
    here = simulate(RunConfig.parse(flat), [node | own for node in nodes], Journal(), "process")

    terminals.leave(
        f"flower-superlink --insecure --host 127.0.0.1 --port {port} "
        "--disable-runtime-dependency-installation",
        tmp_path,
    )
    wait_until(lambda: answers(port), "Flower's server does not answer")
    for node in nodes:
        state = tmp_path / str(node["name"])
        state.mkdir()
        terminals.leave(
            f"fedda-client --role {node['role']} --data {node['data']} --name {node['name']} "
            f"--superlink 127.0.0.1:{port} --insecure --state-dir {state} --threads 1 "
            f"--reproducible --min-images {MIN_IMAGES} --min-examples 1 {more}",
            state,
        )
    run, method = tmp_path / "runs" / "run", settings["method"]
    of_options = {"method", "run.dir", "run.name", "run.baseline"}
    said = " ".join(f"-c {k}={shlex.quote(str(flat[k]))}" for k in flat.keys() - of_options)
    where = f"--superlink 127.0.0.1:{port} --dir {run.parent} --name run --baseline none"
    terminals.run(f"fedda run {method} {where} {said}", tmp_path, PATIENCE)
    live = json.loads((run / "results.json").read_text())
    assert live["events"] == []
    assert final_model(live, method) == final_model(here, method)
