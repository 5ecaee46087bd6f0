"""Memory of the server's program (the ServerApp process) and of the sites, in models.

    python examples/benchmarks/memory.py

Starts a real server and a real client per site, each a separate process, and trains a network of
--mb megabytes. The server's program records its own resident memory as the kernel counts it.

- Idle is VmRSS when the first round begins: everything is imported, all sites have joined, and the
  run's model is made and packed, as it is whenever the server waits.
- Start is VmRSS just before that model is made, so a figure above start is higher by about one.
- The peak is VmHWM. It is reset at the start of every phase and needs no sampling.
- A site's peak is VmHWM above VmRSS after a first run with a tiny model.
- A model is a unit: the bytes that one model takes on the wire.

    models_above_idle_N        peak above idle of FedAvg with N sources, in models: training waves,
                               evaluation and checkpoints
    models_above_start_N       the same peak above start
    kd3a_models_above_idle_N   peak above idle of KD3A with N sources, whose models the target needs
                               together
    kd3a_models_above_start_N  the same peak above start
    sites_N                    FedAvg: the highest peak of a source, and that of the target, in
                               models
    kd3a_sites_N               the same of KD3A
    phases                     peaks above idle, by phase of the training
    model_mb                   the size of a model, in megabytes
    idle_mb                    idle, in megabytes

The last line of the output is one JSON object with these keys.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import live
from processes import forget_peak, peak

TINY_MB = 0.01


def by_phase(measured: live.Measured) -> dict[str, float]:
    """The highest peak of each phase above idle, in models."""
    peaks: dict[str, float] = {}
    for phase in measured.phases:
        peak = round((phase["peak"] - measured.idle) / measured.model, 2)
        peaks[phase["phase"]] = max(peak, peaks.get(phase["phase"], peak))
    return peaks


def measure(
    folder: Path, app: Path, method: str, sources: int, settings: Any
) -> tuple[live.Measured, dict[str, float]]:
    """Run once with so many sources -> measurements, and the sites' peaks by role, in models."""
    live.say(f"{method} with {sources} sources")
    sites = live.domains(folder / "data", sources)
    with live.Served(folder / "server", sites, patience=300) as deployment:
        about = {"method": method, **settings}
        live.run(deployment, app, "tiny", about | live.mlp(TINY_MB) | {"rounds": 1})
        pids = {name: deployment.processes[name].popen.pid for name in sites}
        before = {name: forget_peak(pid) for name, pid in pids.items()}
        measured = live.run(deployment, app, method, about)
        peaks: dict[str, float] = {}
        for name, pid in pids.items():
            models, role = (peak(pid) - before[name]) / measured.model, sites[name][0]
            peaks[role] = max(round(models, 2), peaks.get(role, 0.0))
        return measured, peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=45.0, help="size of the model")
    parser.add_argument("--sources", default="2,10", help="of FedAvg; empty: none")
    parser.add_argument("--kd3a", type=int, default=3, help="sources of KD3A; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wire", default="float32", help="wire.dtype")
    args = parser.parse_args()

    settings = live.mlp(args.mb) | {"rounds": args.rounds, "wire.dtype": args.wire}
    cases = [("fedavg", "", int(k)) for k in args.sources.split(",") if k]
    cases += [("kd3a", "kd3a_", args.kd3a)] if args.kd3a else []
    figures: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2), "phases": {}}
    with tempfile.TemporaryDirectory() as scratch:
        app = live.stage(Path(scratch) / "app")
        for method, prefix, sources in cases:
            folder = Path(scratch) / f"{method}-{sources}"
            run, at_sites = measure(folder, app, method, sources, settings)
            key = f"{prefix}models_above_idle_{sources}"
            figures[key] = round(run.peak(run.idle), 2)
            figures[f"{prefix}models_above_start_{sources}"] = round(run.peak(run.start), 2)
            figures[f"{prefix}sites_{sources}"] = at_sites
            figures["phases"][key] = by_phase(run)
            figures |= {"model_mb": run.model / 1e6, "idle_mb": round(run.idle / 1e6)}
            live.say(f"{key}: {figures[key]}  {figures['phases'][key]}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
