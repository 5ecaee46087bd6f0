"""Write a finished model for programs that do not use fedda, as ONNX.

    x                (N, channels, H, W) images or (N, d) vectors, float32; images in [0, 1]
    probabilities    (N, C) = softmax(model(x)), what `fedda predict` prints

N may be any number. The file holds a description as JSON: the class names in the order of
the outputs, the shape of one input, how images came to it unless they were stretched (`resize`),
the gray values that become 0 and 1 if a run set them (`window`), how gaps in vectors were filled
(`missing`), and the model's name and fedda's version. A file is put in its place only after it was
loaded again and gave the model's probabilities.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import fedda
from fedda import models
from fedda.config.inputs import REFUSE, Inputs
from fedda.data.optional import needed
from fedda.errors import ModelError
from fedda.files import writing

NEEDED = ("export", "An .onnx file", ModelError)  # what `needed` is told
KEY = "fedda"  # key of the description in the metadata of an .onnx file
BATCHES = (1, 5)  # batch sizes of the random inputs on which a file is compared
LARGEST = 1e-4  # allowed difference of a probability; other kernels differ by about 1e-7

Outputs = Callable[[Tensor], Tensor]


class Classifier(nn.Module):
    """The model that is exported: it gives probabilities, so that users need no softmax."""

    def __init__(self, model: models.Model) -> None:
        super().__init__()
        self.model = model
        self.backbone = model.backbone  # here it is a part, so that it is written, too

    def forward(self, x: Tensor) -> Tensor:
        """softmax(model(x)) -> (N, C)."""
        if self.backbone is not None:
            x = self.backbone(x)
        return self.model(x).softmax(dim=1)


@dataclass(frozen=True)
class Exported:
    """A file that was written and checked."""

    path: Path
    difference: float  # the largest difference of a probability, on random inputs


def export(source: Path, out: Path) -> Exported:
    """Write a model as an .onnx file, load that file again and compare.

    Args:
        source: a model.safetensors of fedda.
        out: the file; an existing file is replaced only after the check.

    Raises:
        ModelError: the model cannot be read, a package is missing, or the file's probabilities
            differ from the model's.
        RunError: the file cannot be written.
    """
    if out.exists() and not out.is_file():
        raise ModelError(f"{out} is no file, and what is written is read again; give one by --out.")
    loaded, meta = models.load(source)
    model = Classifier(loaded).eval()
    about = {
        "classes": list(meta.classes),
        "shape": list(meta.shape),
        "input": "float32 (N, " + ", ".join(map(str, meta.shape)) + ")",
        "range": [0, 1] if len(meta.shape) == 3 else None,
        **meta.inputs.changed,
        "output": "class probabilities (N, classes)",
        "model": meta.config.name,
        "version": fedda.__version__,
    }
    with _convertible(meta):
        batches = {"x": {0: torch.export.Dim("batch", min=1)}}
        x = torch.rand(2, *meta.shape)
        program = torch.export.export(model, (x,), dynamic_shapes=batches)
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out, "give another file by --out") as part:
        with _convertible(meta):
            _write(program, part, json.dumps(about))
        difference = compare(model, _read(part)[0], meta.shape)
        if not difference <= LARGEST:  # true for NaN as well
            raise ModelError(
                f"{out.name} gives other probabilities than the model, by up to {difference:.2g}, "
                f"so it was deleted; report the model's name ({meta.config.name}) and the versions "
                "of torch and onnx."
            )
    return Exported(out, difference)


def opened(path: Path) -> tuple[Outputs, tuple[str, ...], Inputs]:
    """A file that `export` wrote: from examples as they are stored to probabilities, its classes.

    Raises:
        ModelError: it cannot be read, or was written by another program.
    """
    try:
        outputs, text = _read(path)
        about = json.loads(text)
        inputs = Inputs(
            tuple(map(int, about["shape"])),
            about.get("resize", "stretch"),
            about.get("window", ""),
            about.get("missing", REFUSE),
            tuple(map(str, about.get("columns", ()))),
        )
        classes = tuple(map(str, about["classes"]))
    except ModelError:
        raise
    except Exception as error:  # the libraries raise errors of many kinds
        raise ModelError(
            f"'{path}' cannot be read as a model of fedda's ({type(error).__name__}); give a file "
            "that `fedda export` wrote, or another program's answers as a table of probabilities."
        ) from error

    @torch.no_grad()
    def said(x: Tensor) -> Tensor:
        return outputs(models.as_inputs(x, torch.device("cpu")))

    return said, classes, inputs


@torch.no_grad()
def compare(model: nn.Module, other: Outputs, shape: tuple[int, ...]) -> float:
    """The largest difference of two models' outputs on random inputs, over all of BATCHES."""
    random = torch.Generator().manual_seed(0)
    worst = torch.zeros(())
    for n in BATCHES:
        x = torch.rand(n, *shape, generator=random)
        expected, given = model(x), other(x)
        if given.shape != expected.shape:
            return float("inf")
        worst = torch.maximum(worst, (given - expected).abs().max())  # keeps a NaN
    return float(worst)


@contextmanager
def _convertible(meta: models.Meta) -> Iterator[None]:
    """Turn any error of a converter into a ModelError: it may not support the model's layers."""
    try:
        yield
    except (OSError, ModelError):
        raise
    except Exception as error:  # the converters raise errors of many kinds
        layers = f" with the layers of {meta.extension}" if meta.extension else ""
        why = "".join(filter(str.isprintable, (str(error).splitlines() or [""])[0]))[:200]
        raise ModelError(
            f"{meta.config.name}{layers} cannot be written as ONNX ({type(error).__name__}: "
            f"{why}); predict with `fedda predict`."
        ) from error


def _write(program: torch.export.ExportedProgram, path: Path, about: str) -> None:
    for module in ("onnx", "onnxruntime", "onnxscript"):
        needed(module, *NEEDED)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    made = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=["x"],
        output_names=["probabilities"],
        dynamic_shapes={"x": {0: "batch"}},
    )
    assert made is not None
    made.model.metadata_props[KEY] = about
    made.save(path)


def _read(path: Path) -> tuple[Outputs, str]:
    onnxruntime = needed("onnxruntime", *NEEDED)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map.get(KEY, "")
    return (lambda x: torch.from_numpy(session.run(["probabilities"], {"x": x.numpy()})[0])), about
