"""DILS over real processes: what an exchange every 4 or 16 steps saves against one at every step.

`adversarial.py --table lazy` runs this. The collaborator, the target and the server are separate
processes, with TLS and node keys.
"""

import math
import os
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import live

from fedda.config.sections import Flat
from fedda.results.escaping import markdown
from fedda.results.read import load


class Row(NamedTuple):
    """One setting of DILS."""

    p: int
    batch: int

    @property
    def examples(self) -> int:
        return self.p * self.batch

    @property
    def name(self) -> str:
        return f"p = {self.p}, batches of {self.batch}"

    def flat(self) -> Flat:
        """The row's settings; under 256 examples a gradient leaves only with an explicit switch."""
        flat: Flat = {"exchange.p": self.p, "train.batch-size": self.batch}
        if self.examples < 256:
            flat |= {"exchange.min-examples": self.examples, "exchange.expose-features": True}
        return flat


ROWS = [Row(16, 64), Row(4, 64), Row(1, 64), Row(1, 256)]


def measure(
    folder: Path, files: Mapping[str, Path], settings: Flat, repeats: int
) -> list[dict[str, Any]]:
    """Run all rows on one deployment, in turn -> time, bytes and accuracy of each.

    Args:
        folder: for keys, logs and results.
        files: the data of the collaborator, then of the target, by site name.
        settings: the settings that all rows share.
        repeats: of every row. All repeats end with the same model; only their times differ.
    """
    roles = ("source", "target")
    sites = {name: (role, path) for role, (name, path) in zip(roles, files.items(), strict=True)}
    app, measured = live.stage(folder / "app"), []
    live.say("starting a server, a collaborator and a target")
    least = ["--min-examples", str(min(row.examples for row in ROWS))]
    options = dict.fromkeys(sites, least)
    deployed = live.Served(folder / "server", sites, client_options=options)
    with deployed as deployment:
        for repeat in range(repeats):
            for number, row in enumerate(ROWS):
                name = f"row-{number}-{repeat}"
                flat = {"method": "dils", **settings, **row.flat()}
                waves = live.run(deployment, app, name, flat)
                results = load(deployment.directory / "runs" / name)
                of_row = figures(row, waves, results, settings) | {
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "load": round(os.getloadavg()[0], 1),
                }
                if repeat:
                    of_row["rounds_s"] = [*measured[number]["rounds_s"], *of_row["rounds_s"]]
                    measured[number] = of_row
                else:
                    measured.append(of_row)
                live.say(f"{row.name}: {of_row}")
    for of_row in measured:
        of_row["round_s"] = round(statistics.median(of_row["rounds_s"]), 2)
        of_row["fastest_s"] = min(of_row["rounds_s"])
    return measured


def figures(
    row: Row, measured: live.Measured, results: Mapping[str, Any], settings: Flat
) -> dict[str, Any]:
    """The figures of one row, over the rounds that adapt (all after the pretraining)."""
    pretrain, training = int(settings["dils.pretrain"]), results["trainings"]["dils"][0]
    adapting = training["rounds"][pretrain:]
    waves = [w for w in measured.waves if w.kind == "train"][pretrain:]
    sent = [sum(n for k, n in r["bytes"].items() if k.endswith(" gradient")) for r in adapting]
    images = max(site["examples"] for site in results["sites"])
    a_round = math.ceil(images / row.batch / float(settings["train.rounds-per-epoch"]))
    return {
        "p": row.p,
        "batch": row.batch,
        "examples": row.examples,
        "steps": a_round * len(adapting),
        "source_only": round(training["rounds"][pretrain - 1]["accuracy"], 4),
        "accuracy": round(training["final_accuracy"], 4),
        "accuracy_selected": round(training["selected_accuracy"], 4),
        "rounds_s": [round(w.seconds, 2) for w in waves],
        "gradient_mb": round(sum(sent) / 1e6, 3),
    }


def _share(seconds: float, base: float) -> str:
    return "" if seconds == base else f"{seconds / base:.2f}"


def report(measured: list[dict[str, Any]], settings: Flat, heading: str, command: str) -> str:
    """Markdown: how it was run, and a line per row with its time as a share of that with p = 1."""
    base = {f["batch"]: f for f in measured if f["p"] == 1}
    heads = ["", "examples a sum", "steps", "before", "last", "selected"]
    heads += ["median round, s", "of p = 1", "fastest, s", "of p = 1", "gradients, MB"]
    lines = [
        [
            f"p = {f['p']}, batches of {f['batch']}",
            str(f["examples"]),
            str(f["steps"]),
            *(f"{100 * f[k]:.1f}" for k in ("source_only", "accuracy", "accuracy_selected")),
            *(
                text
                for k in ("round_s", "fastest_s")
                for text in (f"{f[k]:.1f}", _share(f[k], base[f["batch"]][k]))
            ),
            f"{f['gradient_mb']:.2f}",
        ]
        for f in measured
    ]
    own = ", ".join(f"`{k}={str(v).lower()}`" for k, v in settings.items())
    loads = [f["load"] for f in measured if f["load"]]
    rounds = len(measured[0]["rounds_s"])
    when = f"- measured: {measured[0]['date']} (UTC), {rounds} rounds of every row"
    when += f", while the load average was {min(loads)} to {max(loads)}"
    text = [heading, "", f"    {command}", "", f"- settings: {own}", when, *NOTES]
    return "\n".join([*text, "", *markdown(heads, lines)]) + "\n"


NOTES = (
    "- pen digits, 0 to 30 degrees, seed 0; real processes on loopback with TLS, two shared cores",
    "- `before`, `last`, `selected`: accuracy in % after the pretraining, after the last round, "
    "and of the round with the highest infomax",
    "- `round`: one training wave after the pretraining, Flower's own messages included; "
    "`gradients`: all gradient bytes of these rounds, both ways and of both sites",
    "- every row sees each image equally often; with batches of 256 there are a quarter of the "
    "steps, in the pretraining as well",
    "- rows with fewer than 256 examples a sum need `exchange.expose-features=true` and "
    "`--min-examples` at both sites, and give features away",
)
