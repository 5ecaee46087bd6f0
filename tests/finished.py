"""The results of a finished run, with numbers small enough to check by hand."""

from typing import Any

SITES = [
    {"name": "clp", "role": "source", "examples": 1200, "tested": 0},
    {"name": "bus", "role": "source", "examples": 800, "tested": 0},
    {"name": "tgt", "role": "target", "examples": 500, "tested": 90},
]


def training(seed: int, rounds: list[dict[str, Any]], selected: int | None) -> dict[str, Any]:
    return {
        "seed": seed,
        "selected_round": selected,
        "seconds": 1.5,
        "bytes": {"to source model": 1_000_000, "from source model": 234_567},
        "rounds": [{"round": i + 1, "seconds": 0.5, **r} for i, r in enumerate(rounds)],
    }


def results(**others: Any) -> dict[str, Any]:
    """Two methods, two seeds, two rounds; numbers small enough to check by hand."""

    def each(accuracy: float, infomax: float, clp: float, target: float) -> dict[str, Any]:
        weights = {"tgt": target, "clp": clp, "bus": 1 - clp - target}
        return {"loss": 1.0, "accuracy": accuracy, "infomax": infomax, "weights": weights}

    fedavg = {"loss": 1.0, "accuracy": 0.5, "infomax": 0.1, "weights": {"clp": 0.6, "bus": 0.4}}
    kd3a = [
        training(0, [each(0.9, 0.3, 0.1, 0.25), each(0.8, 0.2, 0.2, 0.2)], selected=1),
        training(1, [each(0.6, 0.2, 0.1, 0.25), each(0.7, 0.4, 0.4, 0.2)], selected=2),
    ]
    return {
        "name": "demo",
        "method": "kd3a",
        "titles": {"fedavg": "FedAvg (source-only)", "kd3a": "KD3A"},
        "config": {"run.evaluate": True},
        "seeds": [0, 1],
        "sites": SITES,
        "selected_by": "highest infomax",
        "trainings": {"fedavg": [training(s, [fedavg] * 2, 1) for s in (0, 1)], "kd3a": kd3a},
        "events": [],
    } | others
