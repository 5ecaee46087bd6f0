"""What a trained model is worth at a target without labels, from the numbers of its last test.

The entries of a training in results.json:

    validators          scores without labels, higher is better: infomax in nats, and bnm, snd, ami
                        (`fedda.maths.validators`); largest, the share of the class given most often
    estimate            of accuracy (`fedda.maths.estimates`), None without a source's calibration:
        accuracy        with its interval, low to high
        parts           three estimates: two of ATC, and DoC
        changed         the share of the answers that was taken off DoC's, as the target's last step
                        changed them; None: the mean of the three
        held_out        whether all sources calibrated on images that they do not train on; else
                        the estimate is too high
        same_model      whether the sources tested the model that the target predicts with; where
                        that one stays at the target, they test the one that the server has
        sources         what each source said, by name
    refined             what the target said of its last step (`fedda.refining`), None without one:
        accuracy        of the refined model, if there are labelled tests
        changed         share of the images whose class is another one than the method's model's
        agreed          share of the images on which all averaged models agree
    beside              on which share of the target's images a training's model has the class that
                        the mean of all these has, by training: the earlier ones that the run named
                        and the target still has, and this one; left out if there are none
    calibration_bytes   what crossed for the sources' tests; in the total, and in no round
    calibration_error   mean gap between confidence and accuracy on the target's labelled tests;
                        None if there are none
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedda.maths import estimates
from fedda.results.read import REFINED
from fedda.wire import ABOVE, BESIDE, THRESHOLDS, VALIDATORS

Numbers = dict[str, float]
WORTH = "worth"  # in the entry of a training's last round, in its checkpoint
NOTHING = {"validators": {}, "estimate": None, "calibration_error": None, REFINED: None}
SCORES = ("confidence", "entropy")


def plausible(calibrations: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The sources' numbers within the bounds that each can have, whatever a site claims."""

    def bounded(name: str, value: float) -> float:
        if name in ("tested", "seconds"):
            return max(value, 0)
        least, most = (-estimates.MOST, estimates.MOST) if name.startswith("threshold-") else (0, 1)
        return min(max(value, least), most)

    return {s: {n: bounded(n, v) for n, v in said.items()} for s, said in calibrations.items()}


def thresholds(calibrations: Mapping[str, Numbers]) -> Numbers:
    """What the target is sent: each source's thresholds."""
    names = [pattern.removesuffix("/*") for pattern in sorted(THRESHOLDS)]
    return {f"{n}/{source}": said[n] for source, said in calibrations.items() for n in names}


def read(
    tested: dict[str, Any],
    calibrations: Mapping[str, Numbers],
    examples: Mapping[str, int],
    target: str,
    same: bool,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """Take the numbers about the model's worth out of a test's -> a training's entries.

    Args:
        tested: the target's numbers; those that are read here are removed from it.
        calibrations: what each source said.
        examples: number of examples by site, which weigh the sources.
        target: the target's name.
        same: whether the sources tested the model that the target predicts with.
        beside: the earlier trainings that the run named, and this one; none if it named none.
    """
    kinds = {pattern.removesuffix("/*") for pattern in ABOVE}
    said = {n: tested.pop(n) for n in [*tested] if n in VALIDATORS or n.split("/")[0] in kinds}
    error = tested.pop("ece", None)
    told = {"accuracy": "accuracy-refined", "changed": "changed", "agreed": "agreed"}
    refined = {name: tested.pop(key) for name, key in told.items() if key in tested}
    agreed = {n: tested.pop(n) for n in BESIDE if n in tested}
    values = {n: v for n, v in said.items() if n in VALIDATORS}
    if "infomax" in tested:
        values = {"infomax": tested["infomax"], **values}
    sites = {}
    for source, numbers in calibrations.items():
        above = {k: said.get(f"above-{k}/{source}") for k in SCORES}
        if None not in above.values() and "confidence" in said:
            sites[source] = estimates.Calibration(
                examples[source],
                numbers["accuracy"],
                numbers["confidence"],
                {f"atc-{k}": float(v) for k, v in above.items() if v is not None},
            )
    found = None
    if sites:
        changed = refined.get("changed") if same else None
        made = estimates.estimate([*sites.values()], said["confidence"], examples[target], changed)
        found = asdict(made) | {
            "held_out": all(calibrations[s]["held"] == 1 for s in sites),
            "same_model": same,
            "sources": {
                s: {k: v for k, v in calibrations[s].items() if k != "seconds"} for s in sites
            },
        }
    worth = {"validators": values, "estimate": found, "calibration_error": error}
    named = {t: agreed[f"agreed-{i}"] for i, t in enumerate(beside) if f"agreed-{i}" in agreed}
    return worth | {REFINED: refined or None} | ({"beside": named} if named else {})
