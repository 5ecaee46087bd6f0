"""The app that peers.py runs on Flower alone: its FedAvg, over clients that send models back."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


class Stamped(FedAvg):
    """FedAvg that writes down when each of its rounds begins."""

    stamps: Path

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Write the time, and do as FedAvg."""
        with self.stamps.open("a") as file:
            file.write(f"{time.time()}\n")
        return super().configure_train(server_round, arrays, config, grid)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Train a model of `mb` megabytes for `rounds` rounds, with all clients in each."""
    wanted: dict[str, Any] = dict(context.run_config)
    count = int(wanted["mb"] * 1e6 / 4)
    model = np.random.default_rng(0).random(count, dtype=np.float32)
    clients = wanted["clients"]
    strategy = Stamped(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.stamps = Path(wanted["stamps"])
    strategy.start(grid, ArrayRecord([model]), num_rounds=wanted["rounds"])
    with strategy.stamps.open("a") as file:
        file.write(f"{time.time()}\n")


@client.train()
def train(message: Message, _: Context) -> Message:
    """Send the model back."""
    metrics = MetricRecord({"num-examples": 64})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)
