"""Malformed input of every kind: it is refused in one sentence, or read, and costs little memory.

Everything is drawn from seeded generators, so a failing case fails again. The exchange over a
network is in here, too; what a site sends and receives in real runs is in test_crossing.py.
"""

import ast
import io
import json
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clients.site import state
from fedda import data, models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import DataError, FeddaError, ModelError
from fedda.settings import Task
from fedda.wire import packing
from fedda.wire.packing import Kind
from server import checkpoint
from tests.fuzzing import mutated, odd, peak

# numpy, Pillow and torch warn of some damages before they fail.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROOM = 200  # megabytes that a whole test may take
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
LABELS = np.arange(6) % 3
# How many damages are drawn.
counts = pytest.mark.parametrize(
    "count",
    [
        pytest.param(25, id="few"),
        pytest.param(
            200,
            marks=pytest.mark.nightly("fedda/data", "fedda/models", "clients/site", "server"),
            id="many",
        ),
    ],
)
IMAGES = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS}
SPARSE = {
    "x_data": np.ones(6),
    "x_indices": np.arange(6) % 5,
    "x_indptr": np.arange(7),
    "x_shape": np.array([6, 5]),
    "y": LABELS,
}
ARRAYS: dict[str, dict[str, Any]] = {
    "images": IMAGES | {"classes": np.array(["a", "b", "c"])},
    "vectors": {"x": np.random.default_rng(1).normal(size=(6, 5)), "y": LABELS},
    "sparse": SPARSE,
}


def npz(arrays: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    np.savez_compressed(written, **arrays)
    return written.getvalue()


def outcome(work: Callable[[], object]) -> str:
    """Do something that may only succeed, or fail with one sentence."""
    try:
        work()
    except FeddaError as error:
        assert "\n" not in str(error) and str(error), error
        return "refused"
    return "read"


def read_site(path: Path) -> None:
    for role in ("source", "target"):
        data.describe(path, role)
        data.verify(path, role)
        data.identities(path, role)


def read_all(path: Path, contents: Iterable[bytes]) -> Counter[str]:
    """Let a site read each content as its file, in bounded memory -> how often which outcome."""
    seen = Counter[str]()
    with peak(ROOM):
        for content in contents:
            path.write_bytes(content)
            seen[outcome(lambda: read_site(path))] += 1
    return seen


# ---- files of a site's data ----------------------------------------------------------------------


@counts
@pytest.mark.parametrize("kind", ARRAYS)
def test_damaged_archives_are_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    draw, whole = Random(f"archive {kind}"), npz(ARRAYS[kind])
    seen = read_all(tmp_path / "site.npz", (mutated(draw, whole) for _ in range(count)))
    assert seen["refused"] > 0.6 * count, seen


def repacked(draw: Random, whole: bytes) -> bytes:
    """Change the arrays inside an archive, so that all checksums still hold."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(written, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if draw.random() < 0.4:
                content = mutated(draw, content)
            if draw.random() < 0.95:
                new.writestr(name, content, zipfile.ZIP_DEFLATED)
    return written.getvalue()


@counts
@pytest.mark.parametrize("kind", ARRAYS)
def test_changed_arrays_are_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    draw, whole = Random(f"arrays {kind}"), npz(ARRAYS[kind])
    seen = read_all(tmp_path / "site.npz", (repacked(draw, whole) for _ in range(count)))
    assert min(seen["refused"], seen["read"]) > 0.03 * count, seen


def member(shape: tuple[int, ...], dtype: str, values: bytes) -> bytes:
    """One array of an archive, which claims any shape and type."""
    written = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(written, header)
    return written.getvalue() + values


def archive(**members: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            new.writestr(f"{name}.npy", content)
    return written.getvalue()


LABELLED = member((6,), "<i8", LABELS.astype("<i8").tobytes())
ZEROS = 300 * 2**20


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (member((2**33, 2), "<f4", b"\0" * 48), "claims 68719476736 bytes of values and holds 48"),
        (member((6, 2**60), "<f8", b"\0" * 48), "claims"),
        (member((6, 2**62), "|u1", b""), "claims"),
        (member((6, -2), "<f4", b""), "claims|cannot be read|negative|empty"),
        (member((6, 2), "|O", b"cos\nsystem\n(S'true'\ntR."), "Python objects"),
        (member((6, 2), "[('a', '<f4')]", b"\0" * 48), "cannot be read|vectors as numbers"),
        (b"", "which only zeros can"),
    ],
    ids=["rows", "columns", "bytes", "negative", "pickle", "records", "zeros"],
)
def test_arrays_that_claim_much_cost_nothing(tmp_path: Path, x: bytes, said: str) -> None:
    path = tmp_path / "site.npz"
    path.write_bytes(archive(x=x or member((6, ZEROS // 24), "<f4", bytes(ZEROS)), y=LABELLED))
    with peak(50), pytest.raises(DataError, match=said) as caught:
        data.load_source(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("columns", [10**8, 2**40, 2**62])
def test_sparse_rows_that_would_fill_the_memory_are_refused(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "site.npz"
    path.write_bytes(npz(SPARSE | {"x_shape": np.array([6, columns])}))
    with peak(50), pytest.raises(DataError, match="keep only columns that are used"):
        data.load_target(path)


FORMATS = {
    "png": ("L", "PNG", {}),
    "jpg": ("RGB", "JPEG", {}),
    "jpeg": ("CMYK", "JPEG", {}),
    "bmp": ("RGB", "BMP", {}),
    "webp": ("RGB", "WEBP", {}),
    "tif": ("RGB", "TIFF", {}),
    "tiff": ("RGB", "TIFF", {"compression": "tiff_lzw"}),
    "palette.png": ("P", "PNG", {}),
    "wrong.png": ("RGB", "GIF", {}),  # the content decides, not the name
    "wrong.tif": ("RGB", "TGA", {}),
    "wrong.bmp": ("RGB", "PPM", {}),
}


@counts
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_images_are_read_or_refused(tmp_path: Path, name: str, count: int) -> None:
    mode, form, options = FORMATS[name]
    written, draw = io.BytesIO(), Random(name)
    Image.fromarray(PIXELS[:3].transpose(1, 2, 0)).convert(mode).save(written, form, **options)
    path = tmp_path / f"image.{name}"
    seen = Counter[str]()
    with peak(ROOM):
        for _ in range(count):
            path.write_bytes(mutated(draw, written.getvalue()))
            seen[outcome(lambda: data.verify(tmp_path, "target"))] += 1
    assert seen["refused"] > 0.1 * count, seen


def test_an_image_that_claims_millions_of_pixels_a_side_is_refused(tmp_path: Path) -> None:
    written = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(written, "PNG")
    head = bytearray(written.getvalue())
    head[16:24] = struct.pack(">II", 2**24, 2**24)
    head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
    (tmp_path / "image.png").write_bytes(head)
    with peak(50), pytest.raises(DataError, match="too many pixels"):
        data.load_target(tmp_path)


# ---- models, checkpoints, states -----------------------------------------------------------------

MLP = ModelConfig(name="mlp", hidden="4")


def changed(draw: Random, tree: Any) -> Any:
    """Change a JSON tree in one place."""
    if isinstance(tree, dict) and tree and draw.random() < 0.8:
        key, rest = draw.choice(list(tree)), dict(tree)
        value = rest.pop(key)
        return rest if draw.random() < 0.15 else rest | {key: changed(draw, value)}
    if isinstance(tree, list) and tree and draw.random() < 0.6:
        place = draw.randrange(len(tree))
        return [*tree[:place], changed(draw, tree[place]), *tree[place + 1 :]]
    value = odd(draw)
    return json.loads(json.dumps(value, default=bytes.hex))


def split(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file -> its header and its values."""
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def joined(header: dict[str, Any], values: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + values


def with_about(draw: Random, whole: bytes) -> bytes:
    """Change what a safetensors file of ours says about itself, or how it lays out its tensors."""
    header, values = split(whole)
    if draw.random() < 0.3:
        return joined(changed(draw, header), values)
    about = json.dumps(changed(draw, json.loads(header["__metadata__"]["fedda"])))
    return joined(header | {"__metadata__": {"fedda": about}}, values)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    model = models.build(MLP, (1, 4, 4), 3, 0)
    path = tmp_path / "model.safetensors"
    models.save(path, model, config=MLP, inputs=Inputs((1, 4, 4)), classes=("a", "b", "c"))
    return path


@counts
def test_damaged_models_are_read_or_refused(model_file: Path, count: int) -> None:
    draw, whole, seen = Random("model"), model_file.read_bytes(), Counter[str]()
    with peak(ROOM):
        for change in [mutated] * count + [with_about] * (2 * count):
            model_file.write_bytes(change(draw, whole))
            outcome(lambda: models.describe(model_file))
            seen[outcome(lambda: models.load(model_file))] += 1
    assert min(seen["refused"], seen["read"]) > 0.03 * count, seen


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sizes", "40000,40000"),
        ("sizes", "9" * 18),
        ("shape", [1, 99999, 99999]),
        ("classes", ["c"] * 10**6),
    ],
)
def test_a_model_that_describes_more_than_it_holds_is_not_built(
    model_file: Path, key: str, value: Any
) -> None:
    header, values = split(model_file.read_bytes())
    about = json.loads(header["__metadata__"]["fedda"])
    (about["config"] if key == "sizes" else about)[key] = value
    model_file.write_bytes(joined({**header, "__metadata__": {"fedda": json.dumps(about)}}, values))
    with peak(150), pytest.raises(ModelError, match=r"damaged|cannot be loaded"):
        models.load(model_file)


@pytest.mark.parametrize("claim", [10, 10**8 + 1, 2**40, 2**63])
def test_a_header_that_claims_much_costs_nothing(model_file: Path, claim: int) -> None:
    whole = model_file.read_bytes()
    model_file.write_bytes(struct.pack("<Q", claim) + whole[8:])
    with peak(50), pytest.raises(ModelError, match="Cannot read"):
        models.load(model_file)


@counts
def test_damaged_checkpoints_are_read_or_refused(tmp_path: Path, count: int) -> None:
    draw, seen = Random("checkpoint"), Counter[str]()
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}
    memory = {"mean/anna": packing.pack(arrays, Kind.MODEL, "float16")}
    held = checkpoint.State(3, arrays, memory, {"a": 1.5}, [{"round": 1}], [[1, 2]], {"round": 1})
    checkpoint.write(tmp_path, held)
    facts = tmp_path / checkpoint.FACTS
    values = tmp_path / f"3.{checkpoint.ARRAYS}"
    whole = {path: path.read_bytes() for path in (facts, values)}
    with peak(ROOM):
        for _ in range(2 * count):
            path = draw.choice([facts, facts, values])
            text = json.dumps(changed(draw, json.loads(whole[facts]))).encode()
            path.write_bytes(text if draw.random() < 0.3 else mutated(draw, whole[path]))
            seen[outcome(lambda: checkpoint.read(tmp_path))] += 1
            path.write_bytes(whole[path])
    assert seen["refused"] > 0.7 * count, seen
    again = checkpoint.read(tmp_path)
    assert again is not None and again.round == 3


class Home:
    """The members of a site that its files need."""

    name = "anna"

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder


@counts
def test_damaged_states_of_a_site_count_as_lost(
    tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="fedda.site")
    draw, site, task = Random("state"), Home(tmp_path), Task(method="fedavg", options=None)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    kept = state.SiteState()
    kept.put_optimizer("net", optimizer)
    state.save(site, task, 1, state.OPTIMIZER, kept)
    (path,) = tmp_path.rglob("*.safetensors")
    whole, seen = path.read_bytes(), Counter[str]()
    with peak(ROOM):
        for change in [mutated] * count + [with_about] * count:
            path.write_bytes(change(draw, whole))
            found = state.load(site, task, 1, state.OPTIMIZER)
            seen["lost" if found is None else "read"] += 1
    assert min(seen["lost"], seen["read"]) > 0.03 * count, seen


# ---- code that could run what a file holds -------------------------------------------------------

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"eval", "exec", "compile", "__import__"}
UNPICKLING = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def runs_code(tree: ast.AST) -> list[str]:
    """What in a module's code reads objects that may run code, or runs text as code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names]
            names = names if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in UNPICKLING]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        weights = called == "torch.load" and given.get("weights_only") == "True"
        plain = called.endswith("yaml.safe_load")
        risky = called in FORBIDDEN or called in ("torch.load", "torch.jit.load")
        risky |= "yaml" in called or given.get("allow_pickle", "False") != "False"
        risky |= called.split(".")[0] in UNPICKLING or called in ("np.fromfile", "os.system")
        if risky and not weights and not plain:
            found.append(ast.unparse(node)[:80])
    return found


def test_no_module_can_run_what_a_file_or_a_message_holds() -> None:
    found = {}
    for folder in ("fedda", "clients", "server", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if risks := runs_code(ast.parse(path.read_text())):
                found[str(path.relative_to(ROOT))] = risks
    # torch raises this module's error for a file that it does not unpickle.
    assert found == {"fedda/models/weights.py": ["pickle"]}
    source = (ROOT / "fedda/models/weights.py").read_text()
    assert source.count("pickle.") == source.count("pickle.UnpicklingError") == 1
