"""`fedda refine`: the local last step, afterwards and anywhere: a finished model and its images."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedda.cli.export import chosen, settings_of
from fedda.cli.its_files import reads_files
from fedda.config import Shares
from fedda.errors import ConfigError
from fedda.halves import REFERENCE, load
from fedda.results.escaping import echo
from fedda.results.read import MODEL, REFINED, label

if TYPE_CHECKING:
    from fedda import models
    from fedda.data import Reading


@reads_files
def refine(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[Path, typer.Option(metavar="DIR")],
    strength: Literal["careful", "strong"] = "careful",
    shares: Shares = "auto",
    linear: Annotated[bool, typer.Option("--linear")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    method: str = "",
    seed: Annotated[int | None, typer.Option(min=0, show_default=False)] = None,
    target: str = "",
    device: str = "auto",
    *,
    reading: "Reading",
) -> None:
    """Refine a finished model by a target's own images, without labels; nothing leaves the machine.

    A run's target does this by itself after the last round (run.refine). The predictions of the
    run's models are averaged: of the method's, of the source-only model (FedAvg) where the run has
    one, and of that with the target's BatchNorm statistics. A Gaussian for each class, tied to
    them, then corrects single answers. The result is a model as all others, for `fedda predict`
    and `fedda export`. If DIR has labelled tests, the accuracies are said.

      fedda refine runs/kd3a --data ./clinic-b

      fedda predict runs/kd3a/refined.safetensors ./new-images

    Options:
        run: A run's folder, or a model.safetensors file.
        data: The target's data; no training label is read.
        strength: How far the step may go.
        shares: Whether it counts how frequent classes seem: by the evidence, or not.
        linear: Write one small model that has learnt the answers.
        out: Default: refined.safetensors beside the model.
        method: Refine a training of this method.
        seed: Refine the training of it.
        target: Refine the training of this target, if the run had several.
        device: auto, cpu or cuda:N.
    """
    source = chosen(run, method, seed, target)
    if out is not None and out.suffix != ".safetensors":
        raise ConfigError(f"--out is {out}, but a model's file ends in .safetensors.")
    place = out or source.with_name(f"{REFINED}.safetensors")
    from fedda import models, refining  # torch takes seconds to import
    from fedda.data import load_evaluation, load_target

    chosen_device = load("clients", "site.memory").pick_device(device)
    model, meta = models.load(source)
    model.to(chosen_device)
    form = reading.form(meta.inputs)
    x = refining.inputs(model, load_target(data, **form).x)
    about = meta.config, meta.shape, strength, shares
    source_only = _source_only(source, meta)
    source_only = source_only and source_only.to(chosen_device)
    made = refining.refined_model(source_only, model, x, *about)
    kept = refining.distilled(made, x) if linear else made.model
    models.save(place, kept, config=meta.config, inputs=meta.inputs, classes=meta.classes)
    count = len(models.refined.members_of(made.model))
    echo(
        f"{place}: {count} models agree on {made.agreed:.0%} of {len(x)} examples; "
        f"{made.changed:.0%} of the answers changed"
    )
    tests = load_evaluation(data, classes=meta.classes, **form)
    if tests is not None:
        before, after = (
            (models.predict(m, tests.x).argmax(dim=1) == tests.y).double().mean()
            for m in (model, kept)
        )
        echo(f"accuracy on its {len(tests)} labelled tests: {before:.1%}, refined {after:.1%}")


def _source_only(source: Path, meta: "models.Meta") -> "models.Model | None":
    """The source-only model of the same run and seed; None if there is none like it."""
    from fedda import models

    folder = source.parent
    if (folder / "config.json").is_file():
        other = folder / label(REFERENCE, settings_of(folder)["run.seeds"].partition(",")[0], "")
    elif found := re.fullmatch(r"[a-z][a-z0-9-]*?-(\d+.*)", folder.name):
        other = folder.with_name(f"{REFERENCE}-{found[1]}")
    else:
        return None
    if other == folder or not (other / MODEL).is_file():
        return None
    model, about = models.load(other / MODEL)
    alike = (about.config, about.shape, about.classes) == (meta.config, meta.shape, meta.classes)
    return model if alike else None
