"""The ServerApp that Flower starts: it reads the run's configuration and executes the run."""

import os
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedda.ops.lock import Holder
from fedda.ops.spawn import SERVER_PID, watch_parent
from fedda.settings import RunConfig

from . import looking, run
from .journal import Journal
from .lane_grid import lanes

JOURNAL = "journal.jsonl"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what `fedda run`, `look` or `flwr run` asks for; an error ends it as failed."""
    if superlink := os.environ.get(SERVER_PID):
        # When its SuperLink dies, Flower asks a ServerApp to end. The ServerApp may then wait for
        # ever for the dead server, and until it ends the run's folder stays locked.
        watch_parent(int(superlink), ask=False)
    config = RunConfig.parse(context.run_config)
    journal = Journal(Path(config.run.dir) / config.run.name / JOURNAL)
    journal.write("started", run=context.run_id, **asdict(Holder.me()))
    way = lanes(grid, config.run.transport, config.run.listen)
    with journal.ending(), way as reached:
        execute = looking.execute if config.run.look else run.execute
        execute(config, reached, journal)
