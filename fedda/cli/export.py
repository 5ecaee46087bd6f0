"""`fedda export`: a finished model as a file for other programs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedda.errors import ConfigError, ModelError, reason
from fedda.results.escaping import echo
from fedda.results.read import MODEL, label


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=f"A run's folder, or a {MODEL} file.")],
    out: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    method: str = "",
    seed: Annotated[int | None, typer.Option(min=0, show_default=False)] = None,
    target: str = "",
) -> None:
    """Write a model for programs that do not use fedda, and check what was written.

    The input is float32: images (N, channels, H, W) in [0, 1], or vectors (N, d), any N. The output
    is the probability of each class (N, classes). Class names and the input's shape are in the
    file. The written file is loaded and run, and deleted if its answers differ from the model's.

      fedda export runs/kd3a

      python -c "
      import json, numpy, onnxruntime
      session = onnxruntime.InferenceSession('runs/kd3a/model.onnx')
      about = json.loads(session.get_modelmeta().custom_metadata_map['fedda'])
      x = numpy.zeros((1, *about['shape']), 'float32')
      print(about['classes'], session.run(['probabilities'], {'x': x})[0])"

    It needs the packages of the extra `export`: pip install "fedda[export]".

    Options:
        out: A folder, or the file itself. Default: beside the model.
        method: Export a training of this method. Default: the run's method.
        seed: Export the training of this seed. Default: the run's first seed.
        target: Export the training of this target, if the run had several.
    """
    source = chosen(run, method, seed, target)
    if out is None or out.is_dir() or not (out.suffix or out.exists()):
        out = (out or source.parent) / f"{source.stem}.onnx"
    if out.suffix != ".onnx":
        raise ConfigError(f"--out is {out}, but the file must end in .onnx.")
    from fedda.models.export import export as write  # torch takes seconds to import

    done = write(source, out)
    echo(f"{done.path}: checked, largest difference {done.difference:.1e}")


def chosen(run: Path, method: str, seed: int | None, target: str) -> Path:
    """The model file that a run, or its options --method, --seed and --target, choose.

    Raises:
        ConfigError: these options come with a file.
        ModelError: there is no such file.
    """
    chooses = bool(method) or seed is not None or bool(target)
    if not run.is_dir():
        if chooses:
            raise ConfigError(
                f"--method, --seed and --target choose among a run's trainings, but {run} is not "
                "a run's folder; leave them out, or give the folder."
            )
        return run
    model = run / MODEL
    if chooses:
        about = settings_of(run) if not method or seed is None else {}
        method = method or about["method"]
        first = about.get("run.seeds", "0").partition(",")[0]
        model = run / label(method, first if seed is None else seed, target) / MODEL
    if model.is_file():
        return model
    finished = ", ".join(sorted(path.parent.name for path in run.glob(f"*-*/{MODEL}")))
    what = f"{model.parent.name} has no {MODEL}" if chooses else f"{run} holds no {MODEL}"
    if finished:
        instead = f"the finished ones are {finished}: choose by --method, --seed and --target."
    elif runs := sorted(
        file.parent for at in ("*", "cells/*") for file in run.glob(f"{at}/{MODEL}")
    ):
        instead = f"give the folder of one run, such as {runs[0]}."
    else:
        instead = "none has yet."
    raise ModelError(f"{what}, which is written when a training has finished; {instead}")


def settings_of(run: Path) -> dict[str, str]:
    """The settings of a run's folder, as texts.

    Raises:
        ModelError: they cannot be read.
    """
    try:
        held = dict(json.loads((run / "config.json").read_text()))
        return {"method": str(held["method"]), "run.seeds": str(held["run.seeds"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{run} does not say which trainings it holds ({reason(error)}); give both "
            "--method and --seed."
        ) from None
