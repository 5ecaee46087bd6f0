"""The simulation that peers_simulation.py makes with Flower's own engine, on Ray.

    python peers_engine.py DATA ROUNDS BATCH LR OUT

Writes OUT: `stamps`, when training began and each round ended, in seconds since 1970, and
`accuracy`, of the target's tests after the last round. The server tests its model after each round.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import peers_network
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

FOLDER, OUT = Path(sys.argv[1]), Path(sys.argv[5])
ROUNDS, BATCH, LR = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
NODES = len(list(FOLDER.glob(f"{peers_network.SOURCE}*.npz")))


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of SGD."""
    torch.set_num_threads(1)
    x, y = peers_network.sources(FOLDER)[int(context.node_config["partition-id"])]
    model: Any = peers_network.network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for indices in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


server = ServerApp()


@server.main()
def serve(grid: Grid, _: Context) -> None:
    """Train for all rounds, with all clients in each."""
    torch.set_num_threads(1)
    stamps, x_y, count = [time.time()], peers_network.tests(FOLDER), NODES
    model, right = peers_network.network(), 0.0

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal right
        model.load_state_dict(arrays.to_torch_state_dict())
        right = peers_network.accuracy(model, *x_y)
        if server_round:  # 0 is before the first
            stamps.append(time.time())
        return MetricRecord({"accuracy": right})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    first, none = ArrayRecord(model.state_dict()), ConfigRecord()
    done = strategy.start(grid, first, num_rounds=ROUNDS, train_config=none, evaluate_fn=test)
    assert len(done.train_metrics_clientapp) == ROUNDS, "clients failed; see the log"
    OUT.write_text(json.dumps({"stamps": stamps, "accuracy": right}))


if __name__ == "__main__":
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=NODES, backend_config=resources)
