"""Arrays of any size: read some rows at a time, the same to the bit, and never whole in memory."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.site.memory import Site
from fedda import data
from fedda.config.inputs import Inputs
from fedda.data import npy
from fedda.data.cache import Cache, Stored
from fedda.errors import DataError

DRAW = np.random.default_rng(0)
KINDS = {
    "gray": DRAW.integers(0, 256, (53, 4, 5), dtype=np.uint8),
    "colour": DRAW.integers(0, 256, (53, 4, 5, 3), dtype=np.uint8),
    "float32": DRAW.normal(size=(53, 9)).astype(np.float32),
    "float64": DRAW.normal(size=(53, 9)),
    "big-endian": DRAW.normal(size=(53, 9)).astype(">f4"),
    "integers": DRAW.integers(-99, 99, (53, 9)),
}


def hdf5(path: Path, **arrays: np.ndarray) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            chunks = (min(7, len(array)), *array.shape[1:]) if array.ndim > 1 else None
            file.create_dataset(name, data=array, chunks=chunks)


WRITERS: dict[str, Callable[..., Any]] = {
    "plain.npz": np.savez,
    "packed.npz": np.savez_compressed,
    "chunks.h5": hdf5,
}


def wanted(array: np.ndarray) -> torch.Tensor:
    """What a site trains on, by whole-array numpy."""
    if array.ndim == 2:
        return torch.from_numpy(array.astype(np.float32))
    images = array.reshape(*array.shape[:3], -1)
    return torch.from_numpy(np.moveaxis(images, 3, 1).copy())


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_same_to_the_bit(
    tmp_path: Path, kind: str, name: str, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.asarray(KINDS[kind], order=order)
    path, y = tmp_path / name, np.arange(53) % 4
    WRITERS[name](path, x_train=array, y_train=y, x_test=array[:5], y_test=y[:5])
    monkeypatch.setattr(npy, "PIECE", 500)  # a few rows
    cache = Cache(tmp_path / "cache", always=True)
    for _ in range(2):  # the second time from what the first kept
        plain, kept = data.load_source(path), data.load_source(path, cache=cache)
        assert isinstance(kept.x, Stored) and not isinstance(plain.x, Stored)
        for found in (plain, kept):
            assert found.x.dtype == wanted(array).dtype and torch.equal(found.x, wanted(array))
            assert found.y.tolist() == y.tolist()
        assert data.identities(path, "source") == plain.digests() == kept.digests()
        assert data.identities(path, "target") == data.load_target(path).digests()
        tested = data.load_evaluation(path, cache=cache)
        assert tested is not None and torch.equal(tested.x, wanted(array[:5]))
        chosen = torch.tensor([52, 0, 7, 7])
        assert torch.equal(kept.take(chosen).x[torch.tensor([1, 3])], plain.x[[0, 7]])
        assert len(list((tmp_path / "cache").iterdir())) == 2


def test_images_are_brought_to_a_form_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x_train=KINDS["colour"], y_train=np.zeros(53, int))
    whole = data.conform(data.load_target(tmp_path / "a.npz"), 1, 6, "crop").x
    monkeypatch.setattr(npy, "PIECE", 500)
    form: dict[str, Any] = {"channels": 1, "size": 6, "resize": "crop"}
    assert torch.equal(data.load_target(tmp_path / "a.npz", **form).x, whole)
    cache = Cache(tmp_path / "cache", always=True)
    assert torch.equal(data.load_target(tmp_path / "a.npz", **form, cache=cache).x, whole)


def test_batches_to_predict_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=KINDS["float64"])
    monkeypatch.setattr(npy, "PIECE", 500)  # 6 rows, so the batches of 4 are read one by one
    found = list(data.batches(tmp_path / "a.npz", (9,), 4))
    assert [len(names) for names, _, _ in found] == [4] * 13 + [1]
    assert [name for names, _, _ in found for name in names] == [str(i) for i in range(53)]
    x = torch.cat([examples.x for _, examples, _ in found])
    assert torch.equal(x, wanted(KINDS["float64"]))


LARGE = 32 << 20  # bytes of the array
MOST = LARGE // 2  # bytes that may be in use at a time: some pieces, never the array


@pytest.mark.parametrize("name", WRITERS)
def test_an_array_is_never_whole_in_memory(tmp_path: Path, name: str) -> None:
    """Python's memory, so numpy's too, stays far under the array's size in all that reads it."""
    n = LARGE // (64 * 64 * 4)
    images = np.broadcast_to(np.arange(64, dtype=np.uint8), (n, 64, 64))
    images = np.repeat(images[..., None], 3, axis=3)
    images[:, 0, 0, 0] = np.arange(n) % 256
    path = tmp_path / name
    WRITERS[name](path, x_train=images, y_train=np.arange(n) % 2)
    size = images.nbytes
    del images
    cache = Cache(tmp_path / "cache", always=True)

    def peak(read: Callable[[], Any]) -> int:
        tracemalloc.start()
        read()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert size > MOST
    assert peak(lambda: data.load_source(path, cache=cache)) < MOST
    assert peak(lambda: data.load_source(path, cache=cache, channels=1, size=32)) < MOST
    assert peak(lambda: data.verify(path, "source")) < MOST
    assert peak(lambda: data.identities(path, "source")) < MOST
    assert peak(lambda: [len(names) for names, _, _ in data.batches(path, (3, 64, 64), 64)]) < MOST
    # The measure sees a whole array:
    assert peak(lambda: np.zeros(size, np.uint8)) >= size


def test_a_site_keeps_large_arrays_on_disk(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=KINDS["gray"], y_train=np.arange(53) % 2)
    node = {"role": "source", "data": str(tmp_path / "a.npz"), "name": "x", "min-images": 16}
    node |= {"reproducible": True}
    plain = Site(node)
    disk = Site(node | {"cache": "disk", "state-dir": str(tmp_path / "state")})
    mine, its = disk.training(Inputs((1, 6, 6))), plain.training(Inputs((1, 6, 6)))
    assert isinstance(mine.x, Stored) and not isinstance(its.x, Stored)
    assert torch.equal(mine.x, its.x)


@pytest.mark.parametrize("kind", ["gray", "float32"])
def test_a_damaged_value_is_found_before_it_is_used(tmp_path: Path, kind: str) -> None:
    path, array = tmp_path / "a.npz", KINDS[kind]
    np.savez(path, x_train=array, y_train=np.arange(53) % 2)
    whole, row = path.read_bytes(), array[40].tobytes()
    at = whole.index(row)
    path.write_bytes(whole[:at] + bytes([row[0] ^ 1]) + whole[at + 1 :])
    cache = Cache(tmp_path / "cache", always=True)
    for read in (
        lambda: data.verify(path, "target"),
        lambda: data.load_target(path, cache=cache),
        lambda: data.load_target(path),
    ):
        with pytest.raises(DataError, match=r"x_train in .* cannot be read"):
            read()
    assert not list(tmp_path.glob("cache/*"))


def test_vectors_too_large_for_memory_need_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=KINDS["float64"])
    monkeypatch.setattr("fedda.ops.system.os.sysconf", lambda name: 10)  # a machine of 100 bytes
    with pytest.raises(DataError, match=r"needs 0 GiB and this machine has 0"):
        data.load_target(tmp_path / "a.npz")
    found = data.load_target(tmp_path / "a.npz", cache=Cache(tmp_path / "cache")).x
    assert isinstance(found, Stored) and torch.equal(found, wanted(KINDS["float64"]))
