"""Sums of models under masks: fixed point, masks that cancel, and what one site's values tell."""

import hashlib
import itertools

import numpy as np
import pytest

from fedda.errors import NotFiniteError, SecureError
from fedda.maths.average import RunningMean
from fedda.secure.masks import LOSS, WEIGHT, FixedPoint, MaskedSum, add_mask, hide, layouts, narrow
from fedda.wire.packing import Arrays, Kind, Packed, layout
from tests.reference import masks as twin

NAMES = ("anna", "bert", "carl")
WEIGHTS = {"anna": 40, "bert": 50, "carl": 60}


def seeds(name: str) -> dict[bytes, bool]:
    """The seeds of one site's masks: each pair has one, which the first of the two adds."""
    return {
        hashlib.sha256("".join(sorted((name, other))).encode()).digest(): name < other
        for other in NAMES
        if other != name
    }


def network(place: int) -> Arrays:
    rng = np.random.default_rng(place)
    return {
        "a.weight": rng.normal(0, 0.3, (50, 40)).astype(np.float32),
        "a.running_mean": rng.normal(0, 2, 40).astype(np.float32),
        "a.running_var": rng.gamma(2, 300, 40).astype(np.float32),
        "a.num_batches_tracked": np.array(3 + place, np.int64),
    }


def sent_by(name: str, model: Arrays, point: FixedPoint, loss: float = 1.0) -> Packed:
    form = layouts(None, layout(model, Kind.MODEL))["masked"]
    return hide(model, loss, WEIGHTS[name], point, seeds(name), form)


def added(*packed: Packed, point: FixedPoint) -> MaskedSum:
    total = MaskedSum(network(9), point)
    for each in packed:
        total.add(each)
    return total


@pytest.fixture(scope="module")
def point() -> FixedPoint:
    return FixedPoint(network(9), len(NAMES), max(WEIGHTS.values()))


@pytest.mark.parametrize(("shape", "bits", "b"), [((2,), 64, 44), ((1, 2), 32, 22)])
def test_two_models_by_hand(shape: tuple[int, ...], bits: int, b: int) -> None:
    """(1, -2) and (4, 1), with weights 1 and 2: the mean is (3, 0).

    The model sent is 0, so a value may be 2^16; the sum of two with weights up to 2 has 62 bits:
    b = 62 - 1 - 1 - 16 = 44. A matrix may have 30 bits, of which a value of the model may take 6:
    b = 30 - 1 - 1 - 6 = 22.
    """
    point = FixedPoint({"w": np.zeros(shape, np.float32)}, 2, 2, {"w"} if bits == 32 else set())
    assert point.bits["w"] == b
    first = point.encode("w", np.array([1.0, -2.0], np.float32).reshape(shape), 1)
    second = point.encode("w", np.array([4.0, 1.0], np.float32).reshape(shape), 2)
    assert first.dtype == f"uint{bits}" and first.tolist() == [2**b, 2**bits - 2 ** (b + 1)]
    assert second.tolist() == [2 ** (b + 3), 2 ** (b + 1)]
    add_mask(first, bytes(32), True)
    add_mask(second, bytes(32), False)
    assert first.tolist() != [2**b, 2**bits - 2 ** (b + 1)]
    assert point.decode("w", first + second, 3).tolist() == [3.0, 0.0]


def test_the_mask_is_aes_256_in_counter_mode() -> None:
    """The first block under a key of zeros, from NIST's known answers (AESAVS, appendix)."""
    values = np.zeros(2, np.uint64)
    add_mask(values, bytes(32), True)
    assert values.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_a_mask_is_the_same_over_pieces() -> None:
    whole = np.zeros(2**18 + 5, np.uint64)
    add_mask(whole, bytes(range(32)), True)
    begin = np.zeros(7, np.uint64)
    add_mask(begin, bytes(range(32)), True)
    assert (whole[:7] == begin).all()
    assert len(np.unique(whole)) == whole.size
    add_mask(whole, bytes(range(32)), False)
    assert not whole.any()


def test_the_twin_gives_the_same() -> None:
    point, rng = FixedPoint({"w": np.ones(6, np.float32)}, 3, 60), np.random.default_rng(1)
    values = {name: rng.normal(0, 1, 6).astype(np.float32) for name in NAMES}
    encoded = {n: point.encode("w", v, WEIGHTS[n]) for n, v in values.items()}
    for name, each in encoded.items():
        assert each.tolist() == twin.encode(values[name].tolist(), WEIGHTS[name], point.bits["w"])
    pairs = {}
    for a, b in itertools.combinations(NAMES, 2):
        mask = np.zeros(6, np.uint64)
        add_mask(mask, hashlib.sha256((a + b).encode()).digest(), True)
        pairs[a, b] = mask.tolist()
    wanted = twin.masked({n: v.tolist() for n, v in encoded.items()}, pairs)
    for name, each in encoded.items():
        for seed, add in seeds(name).items():
            add_mask(each, seed, add)
        assert each.tolist() == wanted[name]
    total = sum(encoded.values(), np.zeros(6, np.uint64))
    found = point.decode("w", total, 150).tolist()
    assert found == pytest.approx(twin.mean(wanted, point.bits["w"], 150), rel=1e-15)


def test_the_sum_is_the_plain_mean_to_the_fixed_points_step(point: FixedPoint) -> None:
    sites = {name: network(place) for place, name in enumerate(NAMES)}
    total = added(
        *(sent_by(n, m, point, loss=i) for i, (n, m) in enumerate(sites.items())), point=point
    )
    found, loss = total.result(150)
    plain = RunningMean(network(9))
    for name, model in sites.items():
        plain.add(model, WEIGHTS[name] / 150)
    for name, wanted in plain.result().items():
        assert found[name].dtype == wanted.dtype
        if name in point.bits:
            exact = sum(WEIGHTS[n] * m[name].astype(np.float64) for n, m in sites.items()) / 150
            step = point.members / 2 * 2.0 ** -point.bits[name] / 150  # half a step per site
            assert step < 1e-9
            rounding = np.spacing(np.abs(exact).astype(np.float32))
            assert (np.abs(found[name] - exact) <= step + rounding).all(), name
            assert (np.abs(found[name] - wanted) <= step + rounding).all(), name
        else:
            assert found[name] == wanted  # the largest counter
    assert loss == pytest.approx((0 * 40 + 1 * 50 + 2 * 60) / 150, abs=1e-9)


@pytest.mark.parametrize("left", [1, 2])
def test_without_all_sites_what_is_left_is_noise(point: FixedPoint, left: int) -> None:
    """One site's values, and those of all but one, are uniform and tell nothing of the models."""
    sites = {name: network(place) for place, name in enumerate(NAMES)}
    packed = [sent_by(n, m, point) for n, m in list(sites.items())[:left]]
    total = np.zeros(2000, np.uint64)
    for each in packed:
        total += each.raw()["a.weight"].reshape(-1).view(np.uint64)
    model = sum(WEIGHTS[n] * sites[n]["a.weight"].ravel() for n in NAMES[:left])
    uniform = total / 2.0**64
    assert abs(np.corrcoef(uniform, model)[0, 1]) < 4 / np.sqrt(2000)
    counts = np.histogram(uniform, 20, (0, 1))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 45.3  # chi-square of 19 degrees, p = .0006
    bits = np.unpackbits(total.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 4 * 0.5 / np.sqrt(64 * 2000)
    with pytest.raises(SecureError, match=f"masked models of {left} sites"):
        added(*packed, point=point).result(sum(WEIGHTS[n] for n in NAMES[:left]))


def test_the_weight_is_masked_and_has_to_add_up(point: FixedPoint) -> None:
    packed = [sent_by(n, network(i), point) for i, n in enumerate(NAMES)]
    assert packed[0].raw()[WEIGHT][0] != WEIGHTS["anna"]
    with pytest.raises(SecureError, match="do not add up"):
        added(*packed, point=point).result(149)
    other = [*packed[:2], packed[0]]  # masks that do not cancel
    with pytest.raises(SecureError, match="do not add up"):
        added(*other, point=point).result(150)


def test_values_that_could_overflow_are_refused() -> None:
    point = FixedPoint({"w": np.full(1, 3.0, np.float32)}, 5, 1000)  # up to 4 x 2^16
    most = point.encode("w", np.array([2.0**18]), 1000)
    assert 5 * int(most[0]) < 2**63
    with pytest.raises(SecureError, match=r"beyond 262144.*lower train.lr"):
        point.encode("w", np.array([2.0**18 * 1.001]), 1000)
    with pytest.raises(NotFiniteError, match="w of this site"):
        point.encode("w", np.array([np.nan]), 1000)
    with pytest.raises(SecureError, match="sum:loss"):
        point.encode(LOSS, np.array([1e5]), 1000)


@pytest.mark.parametrize(
    "value, bits", [(0.5, 0), (1.0, 0), (1.0001, 1), (2.0, 1), (2.5, 2), (4.0, 2)]
)
def test_the_bound_is_the_next_power_of_two(value: float, bits: int) -> None:
    sent = {"w": np.array([-value, 0.1], np.float32)}
    assert FixedPoint(sent, 1, 1).bits["w"] == 62 - 16 - bits


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("members, most", [(3, 1), (3, 2**40), (64, 100), (65, 1_000_003)])
def test_no_group_overflows(members: int, most: int, sign: int, short: bool) -> None:
    """All sites send the most that they may, with the most weight."""
    bits, bound = (32, 2.0 ** (3 + 6)) if short else (64, 2.0 ** (3 + 16))
    sent = {"w": np.full((1, 1), 7.0, np.float32)}
    point = FixedPoint(sent, members, most, {"w"} if short else set())
    largest = point.encode("w", np.array([sign * bound]), most)
    q = twin.encode([sign * bound], most, point.bits["w"], 2**bits)
    assert largest.tolist() == q
    signed = q[0] - 2**bits * (sign < 0)
    assert members * abs(signed) < 2 ** (bits - 1)
    total = np.array([(members * signed) % 2**bits], f"uint{bits}")
    found = point.decode("w", total, members * most)[0]
    assert found == pytest.approx(sign * bound, rel=1e-12)
    says = "lower train.lr, set wire.dtype to float32, or" if short else "lower train.lr, or"
    with pytest.raises(SecureError, match=f"beyond {bound:g}.*{says}"):
        point.encode("w", np.array([sign * bound * 1.001]), most)


# ---- in 32 bits ----------------------------------------------------------------------------------

COARSE = layout(network(0), Kind.MODEL, "bfloat16")


@pytest.mark.parametrize("floats", ["bfloat16", "float16", "int8"])
def test_only_arrays_of_two_axes_take_four_bytes(floats: str) -> None:
    model = layout(network(0), Kind.MODEL, floats)
    assert narrow(model) == {"a.weight"} and not narrow(layout(network(0), Kind.MODEL))
    short, whole = (layouts(None, m)["masked"] for m in (model, layout(network(0), Kind.MODEL)))
    assert whole.nbytes - short.nbytes == 4 * 2000
    assert {e.name: e.dtype for e in short.entries} == {
        e.name: "int32" if e.name == "a.weight" else "int64" for e in whole.entries
    }


def in_32_bits() -> tuple[dict[str, Arrays], FixedPoint, list[Packed]]:
    sites = {name: network(place) for place, name in enumerate(NAMES)}
    point = FixedPoint(network(9), len(NAMES), max(WEIGHTS.values()), narrow(COARSE))
    form = layouts(None, COARSE)["masked"]
    packed = [hide(m, 1.0, WEIGHTS[n], point, seeds(n), form) for n, m in sites.items()]
    return sites, point, packed


def test_the_sum_is_exactly_that_of_the_fixed_point_numbers() -> None:
    """Masks take nothing away: the masked sum is the plain one, to the last bit, in both rings."""
    sites, point, packed = in_32_bits()
    for name, bits in {"a.weight": 32, "a.running_mean": 64, "a.running_var": 64}.items():
        plain = [
            twin.encode(m[name].ravel().tolist(), WEIGHTS[n], point.bits[name], 2**bits)
            for n, m in sites.items()
        ]
        sent = [p.raw()[name].ravel().view(f"uint{bits}").tolist() for p in packed]
        wanted = [sum(column) % 2**bits for column in zip(*plain, strict=True)]
        assert [sum(column) % 2**bits for column in zip(*sent, strict=True)] == wanted
        assert sent[0] != plain[0]
    found, loss = added(*packed, point=point).result(150)
    assert loss == pytest.approx(1.0, abs=1e-9)
    for name in point.bits.keys() & found.keys():
        exact = sum(WEIGHTS[n] * m[name].astype(np.float64) for n, m in sites.items()) / 150
        step = point.members / 2 * 2.0 ** -point.bits[name] / 150  # half a step per site
        assert step < (2e-6 if name == "a.weight" else 1e-9)
        rounding = np.spacing(np.abs(exact).astype(np.float32))
        assert (np.abs(found[name] - exact) <= step + rounding).all(), name


def test_in_32_bits_one_sites_values_are_uniform_and_both_rings_have_masks_of_their_own() -> None:
    sites, point, packed = in_32_bits()
    values = packed[0].raw()["a.weight"].ravel().view(np.uint32)
    counts = np.histogram(values / 2.0**32, 20, (0, 1))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 45.3  # chi-square of 19 degrees, p = .0006
    model = sites["anna"]["a.weight"].ravel()
    assert abs(np.corrcoef(values, model)[0, 1]) < 4 / np.sqrt(2000)
    masks = values - point.encode("a.weight", model, WEIGHTS["anna"])
    wide = packed[0].raw()["a.running_mean"].view(np.uint64)
    wide = wide - point.encode("a.running_mean", sites["anna"]["a.running_mean"], WEIGHTS["anna"])
    assert not set(wide.view(np.uint32).tolist()) & set(masks.tolist())


def test_a_model_of_doubles_needs_room_of_its_own_in_32_bits() -> None:
    sent = {"w": np.zeros((2, 3))}
    point = FixedPoint(sent, 1, 1, {"w"})
    form = layouts(None, layout(sent, Kind.MODEL, "bfloat16"))["masked"]
    model = {"w": np.arange(6.0).reshape(2, 3)}
    total = MaskedSum(sent, point)
    total.add(hide(model, 0.5, 1, point, {}, form))
    found, loss = total.result(1)
    assert found["w"].dtype == np.float64 and loss == 0.5
    np.testing.assert_array_equal(found["w"], model["w"])
