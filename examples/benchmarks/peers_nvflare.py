"""The run that peers.py makes with NVIDIA FLARE; it runs in FLARE's own environment.

    python peers_nvflare.py FOLDER CLIENTS MEGABYTES ROUNDS

Writes FOLDER/stamps.json: `ordered`, and `stamps`, when each round began and the last one ended, in
seconds since 1970, as the server's log has them.
"""

import json
import re
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes import NumpyFedAvgRecipe  # pyright: ignore[reportMissingImports]
from nvflare.recipe import PocEnv  # pyright: ignore[reportMissingImports]

CLIENT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    if (model := flare.receive()) is None:
        break
    flare.send(flare.FLModel(params=model.params, meta={"NUM_STEPS_CURRENT_ROUND": 64}))
"""
BEGINS, ENDS = re.compile(r"Round \d+ started"), re.compile(r"Finished FedAvg")
TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ", re.MULTILINE)


def main() -> None:
    folder, clients, mb, rounds = Path(sys.argv[1]), *map(float, sys.argv[2:])
    (folder / "client.py").write_text(CLIENT)
    model = np.random.default_rng(0).random(round(mb * 1e6 / 4), dtype=np.float32)
    np.save(folder / "model.npy", model)
    recipe = NumpyFedAvgRecipe(
        name="peer",
        initial_ckpt=str(folder / "model.npy"),
        min_clients=int(clients),
        num_rounds=int(rounds),
        train_script=str(folder / "client.py"),
    )
    env = PocEnv(num_clients=int(clients))
    recipe.execute(env).get_result(timeout=1200, clean_up=False)
    (log,) = folder.glob("poc/**/transfer/*/workspace/log.txt")
    text = log.read_text()
    ordered = json.loads((log.parent.parent / "meta.json").read_text())["submit_time"]
    found = [stamp(text, at.start()) for at in BEGINS.finditer(text)]
    last = ENDS.search(text)
    assert last is not None, "the server's log ends before FedAvg does"
    (folder / "stamps.json").write_text(
        json.dumps({"ordered": ordered, "stamps": [*found, stamp(text, last.start())]})
    )


def stamp(text: str, place: int) -> float:
    """The time of the log's record in which this place is."""
    *_, last = TIME.finditer(text, 0, place)
    return datetime.strptime(last[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


if __name__ == "__main__":
    main()
