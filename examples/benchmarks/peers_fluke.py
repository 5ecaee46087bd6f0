"""The simulation that peers_simulation.py makes with fluke; it runs in fluke's own environment.

    python peers_fluke.py DATA ROUNDS BATCH LR OUT

Writes OUT: `stamps`, when training began and each round ended, in seconds since 1970, and
`accuracy`, of the target's tests after the last round. fluke tests its model after each round, on
the server, by the seven figures that it has by default; clients test nothing.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import peers_network
import torch
from fluke import DDict, FlukeENV  # pyright: ignore[reportMissingImports]
from fluke.algorithms.fedavg import FedAVG  # pyright: ignore[reportMissingImports]
from fluke.data import (  # pyright: ignore[reportMissingImports]
    DataSplitter,
    DummyDataContainer,
    FastDataLoader,
)
from fluke.evaluation import ClassificationEval  # pyright: ignore[reportMissingImports]
from fluke.utils import (  # pyright: ignore[reportMissingImports]
    FederationObserver,
    ServerObserver,
)


class Stamps(ServerObserver, FederationObserver):
    """Writes down when each round ends, and the last test."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.accuracy = 0.0

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, Any]) -> None:
        """Keep the accuracy."""
        self.accuracy = evals["accuracy"]

    def end_round(self, round: int) -> None:
        """Keep the time."""
        self.stamps.append(time.time())


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[5])
    rounds, batch, lr = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    env = FlukeENV()
    env.set_seed(0)
    env.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    about = {"num_labels": 10, "batch_size": batch}
    clients = [FastDataLoader(*s, shuffle=True, **about) for s in peers_network.sources(folder)]
    server = FastDataLoader(*peers_network.tests(folder), num_labels=10, batch_size=128)
    data = DummyDataContainer(clients, [None] * len(clients), server, num_classes=10)
    client = {"batch_size": batch, "local_epochs": 1, "loss": "CrossEntropyLoss"}
    client |= {
        "optimizer": DDict(name="SGD", lr=lr),
        "scheduler": DDict(name="StepLR", step_size=1),
    }
    client["scheduler"]["gamma"] = 1
    method = DDict(client=DDict(client), server=DDict(weighted=True), model=peers_network.network())
    federation = FedAVG(len(clients), DataSplitter(data), method)
    stamps = Stamps()
    federation.set_callbacks(stamps)
    began = time.time()
    federation.run(rounds, 1.0)
    found = {"stamps": [began, *stamps.stamps], "accuracy": stamps.accuracy}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
