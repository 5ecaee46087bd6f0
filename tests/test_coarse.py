"""Values in fewer bytes: rows of whole numbers with a scale, and changes of a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedda import plugins, records
from fedda.errors import NotFiniteError, QuorumError, WireError
from fedda.maths.coarse import fill_rows, read_rows, row_bytes, scales_of
from fedda.wire.packing import CHANGE, Kind, Manifest, Packed, change, lay_out, pack
from strategies.base import FedDA
from tests.crossed import FIRST_PHASE
from tests.local_grid import SOURCES, Bench, Node, run
from tests.reference import coarse as naive

numbers = st.floats(-1000, 1000, width=32)
matrices = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5), elements=numbers
)


def written(values: np.ndarray) -> np.ndarray:
    into = np.zeros(4 * len(values) + values.size, np.uint8)
    fill_rows(values, into)
    return into


def travelled(packed: Packed) -> Packed:
    """What the receiver makes of the bytes."""
    return Packed(Manifest.parse(packed.manifest.text), bytes(packed.buffer))


def model(draws: np.random.Generator, size: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "conv": (size * draws.normal(size=(6, 3, 3, 3))).astype(np.float32),
        "head": (size * draws.normal(size=(4, 10))).astype(np.float32),
        "bias": (size * draws.normal(size=4)).astype(np.float32),
        "steps": np.array(7),
    }


# ---- rows ----------------------------------------------------------------------------------------


def test_two_rows_by_hand() -> None:
    """The scales are 254 / 127 = 2 and 0; 5 / 2 = 2.5 goes to the even 2, -253 / 2 to -126."""
    values = np.array([[254, 5, -253, 0.9], [0, 0, 0, 0]], np.float32)
    found = written(values)
    assert found[:8].view(np.float32).tolist() == [2, 0]
    assert found[8:].view(np.int8).tolist() == [127, 2, -126, 0, 0, 0, 0, 0]
    assert read_rows(found, (2, 4)).tolist() == [[254, 4, -252, 0], [0, 0, 0, 0]]


@given(matrices)
def test_the_twin_gives_the_same(values: np.ndarray) -> None:
    found = written(values)
    scales, whole = naive.rounded(values)
    assert scales_of(found, values.shape).tolist() == scales
    assert found[4 * len(values) :].view(np.int8).tolist() == [q for row in whole for q in row]
    np.testing.assert_array_equal(read_rows(found, values.shape), naive.coarse(values))


@given(matrices)
def test_no_value_moves_by_more_than_half_a_step(values: np.ndarray) -> None:
    moved = np.abs(read_rows(written(values), values.shape) - values).reshape(len(values), -1)
    step = np.abs(values).reshape(len(values), -1).max(1) / 127
    assert (moved.max(1) <= 0.501 * step + 1e-40).all()


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 7 * 2.0**-149, width=32)))
def test_the_smallest_values_stay_small(values: np.ndarray) -> None:
    assert np.abs(read_rows(written(values), values.shape)).max() <= 127 * 2.0**-149


def test_rows_of_more_than_a_block_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    wanted = written(values)
    monkeypatch.setattr("fedda.maths.coarse.BLOCK", 20)  # two rows
    np.testing.assert_array_equal(written(values), wanted)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((64, 3, 3, 3), 4 * 64 + 64 * 27), ((5, 2), 30), ((5, 1), 0), ((9,), 0), ((), 0), ((0, 4), 0),
     ((4, 0), 0)],
)  # fmt: skip
def test_only_what_gets_shorter_travels_so(shape: tuple[int, ...], wanted: int) -> None:
    assert row_bytes(shape) == wanted


# ---- models --------------------------------------------------------------------------------------


def test_a_model_takes_a_quarter_and_vectors_stay_whole() -> None:
    draws = np.random.default_rng(0)
    given = model(draws) | {"large": draws.normal(size=(100, 1000)).astype(np.float32)}
    packed = travelled(pack(given, Kind.MODEL, "int8"))
    assert len(packed.buffer) == (24 + 162 + 6) + (16 + 40) + 16 + 8 + (400 + 100_000)
    found = packed.unpack()
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {
        n: (a.dtype, a.shape) for n, a in given.items()
    }
    for name in ("conv", "head", "large"):
        np.testing.assert_array_equal(found[name], naive.coarse(given[name]))
        np.testing.assert_array_equal(packed.entry(name), found[name])
    np.testing.assert_array_equal(found["bias"], given["bias"])
    assert found["steps"] == 7
    assert lay_out(packed.manifest, packed.raw()).buffer == packed.buffer  # as a checkpoint does


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.MODEL])
def test_only_models_travel_so(kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    packed = travelled(pack({"z": values}, kind, "int8"))
    np.testing.assert_array_equal(packed.unpack()["z"], values)


def test_a_change_keeps_what_rounding_a_model_would_lose() -> None:
    draws = np.random.default_rng(0)
    exact = model(draws)
    sent = pack(exact, Kind.MODEL, "int8")
    got = travelled(sent).unpack()
    moves = model(draws, size=1e-5)  # a step of the model's own rounding is near 0.01
    trained = {n: got[n] + moves[n] if n != "steps" else a for n, a in got.items()}
    reply = travelled(change(trained, travelled(sent)))
    assert reply.manifest.floats == CHANGE and len(reply.buffer) == len(sent.buffer)
    found = reply.of(sent).unpack()
    for name in ("conv", "head"):
        half = np.abs(moves[name]).max() / 254
        assert np.abs(found[name] - trained[name]).max() < 1.1 * half + 1e-6
        whole = pack(trained, Kind.MODEL, "int8").unpack()[name]  # the whole numbers stay as sent
        off, kept = (np.abs(a - trained[name]).mean() for a in (whole, found[name]))
        assert off > 0.5 * np.abs(moves[name]).mean() > 20 * kept
    np.testing.assert_array_equal(found["bias"], trained["bias"])
    # The server adds the change to its own model, and so loses nothing that it rounded away.
    remembers = Packed(sent.manifest, sent.buffer, pack(exact, Kind.MODEL))
    whole = reply.of(remembers).unpack()
    for name in ("conv", "head"):
        np.testing.assert_allclose(whole[name] - exact[name], moves[name], atol=1e-6)


def test_a_change_of_a_part_of_a_model_needs_only_that_part() -> None:
    draws = np.random.default_rng(0)
    sent, head = pack(model(draws), Kind.MODEL, "int8"), {"head": model(draws)["head"]}
    found = travelled(change(head, sent)).of(sent).unpack()["head"]
    np.testing.assert_allclose(found, head["head"], atol=0.05)


def test_a_change_of_nothing_known_is_refused() -> None:
    sent = pack(model(np.random.default_rng(0)), Kind.MODEL, "int8")
    reply = travelled(change(sent.unpack(), sent))
    other = pack({"head": np.ones((4, 10), np.float32)}, Kind.MODEL)
    for base in (None, other):
        with pytest.raises(WireError, match="A packed model is the change of one that nobody sent"):
            reply.of(base)
    with pytest.raises(WireError, match="nobody sent"):
        reply.check_finite("anna")
    assert sent.of(None) is sent


# ---- what is no model ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["head", "bias"])
def test_values_that_are_not_finite_are_named(value: float, name: str) -> None:
    given = model(np.random.default_rng(0))
    given[name].reshape(-1)[2] = value
    sent = pack(model(np.random.default_rng(1)), Kind.MODEL, "int8")
    for packed in (pack(given, Kind.MODEL, "int8"), change(given, sent)):
        with pytest.raises(NotFiniteError, match=f"{name} from anna holds values that are not fin"):
            packed.check_finite("anna")


def made(scale: float, whole: int = 127, dtype: str = "float32") -> Packed:
    """A model of one array whose sender chose the bytes."""
    manifest = pack({"w": np.ones((1, 4), dtype)}, Kind.MODEL, "int8").manifest
    data = np.array([scale], np.float32).tobytes() + np.full(4, whole, np.int8).tobytes()
    return Packed(manifest, data)


@pytest.mark.parametrize("scale", [np.inf, np.nan, 3e38, 2.7e36])
def test_a_scale_that_gives_values_that_are_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(NotFiniteError, match="w from anna holds values that are not finite"):
        made(scale, -128).check_finite("anna")


@pytest.mark.parametrize("scale", [-1.0, -1e-40, -np.inf])
def test_a_negative_scale_is_refused(scale: float) -> None:
    with pytest.raises(WireError, match="w from anna has a scale below 0"):
        made(scale).check_finite("anna")


def test_the_largest_scale_of_a_type_passes_and_the_next_does_not() -> None:
    made(2.6e36, -128).check_finite("anna")
    assert np.isfinite(made(2.6e36, -128).unpack()["w"]).all()
    made(500, -128, "float16").check_finite("anna")
    with pytest.raises(NotFiniteError):
        made(600, -128, "float16").check_finite("anna")


def test_a_change_that_only_overflows_with_its_model_is_refused() -> None:
    sent = pack({"w": np.full((1, 4), 3e38, np.float32)}, Kind.MODEL)
    reply = replaced(made(2e36), CHANGE)
    with pytest.raises(NotFiniteError, match="w from anna holds values that are not finite"):
        reply.of(sent).check_finite("anna")
    reply.of(pack({"w": np.zeros((1, 4), np.float32)}, Kind.MODEL)).check_finite("anna")


def replaced(packed: Packed, floats: str) -> Packed:
    manifest: Any = packed.manifest
    return Packed(Manifest(manifest.kind, floats, manifest.entries), packed.buffer)


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "says"), [(-1.0, "has a scale below 0"), (np.nan, "not finite"), (1e30, "norms away")]
)
def test_the_server_leaves_out_a_site_with_such_scales(
    domains: list[Node], scale: float, says: str
) -> None:
    def crafted(request: Message, reply: Message) -> list[Message]:
        arrays, tables = records.read(reply.content)
        data = bytearray(arrays["model"].buffer)
        data[:4] = np.array([scale], np.float32).tobytes()  # of the first layer's first row
        own = {"model": Packed(arrays["model"].manifest, bytes(data))}
        return [Message(records.write(own, **tables), reply_to=request)]

    made = Bench(domains, "fedavg", {"anna": crafted}, wire__dtype="int8")
    made.round()
    ((what, site, text),) = made.notices
    assert (what, site) == ("refused", "anna") and says in text


def test_a_site_refuses_a_change_of_nothing_that_it_has(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: FedDA, packed: Packed) -> Packed:
        return change(packed.unpack(), packed)

    monkeypatch.setattr(FedDA, "as_sent", changed)
    made = Bench(domains, "fedavg", wire__dtype="int8")
    with pytest.raises(QuorumError):
        made.round()
    assert {(what, site) for what, site, _ in made.notices} == {("failed", n) for n in SOURCES}
    assert all("does not list" in text for *_, text in made.notices)


# ---- whole trainings -----------------------------------------------------------------------------


@pytest.mark.nightly("fedda/wire", "fedda/maths/coarse.py")
@pytest.mark.parametrize("method", sorted(plugins.own_methods()))
def test_every_method_trains_alike(domains: list[Node], tmp_path: Path, method: str) -> None:
    """In the first phase and the next one: the losses differ little, and no reply is refused."""
    losses, sent = [], []
    for dtype in ("float32", "int8"):
        own = FIRST_PHASE.get(method, {}) | {"run.dir": str(tmp_path / dtype), "rounds": 3}
        results, _ = run(domains, {"method": method, "wire.dtype": dtype} | own)
        ((training,),) = results["trainings"].values()
        assert not results["events"]
        losses.append([r["loss"] for r in training["rounds"] if "loss" in r])
        sent.append(training["bytes"]["from source model"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0]
    assert sent[1] < 0.4 * sent[0]
