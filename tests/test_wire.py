"""The wire contract: packing loses nothing, and whatever is not listed is refused by name."""

import json
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedda.errors import NotFiniteError, WireError
from fedda.maths.coarse import largest
from fedda.wire import TEST, Rule
from fedda.wire.packing import (
    ALIGN,
    DTYPES,
    MAX_ENTRIES,
    Arrays,
    Kind,
    Manifest,
    Packed,
    lay_out,
    pack,
)

WHOLE = sorted(DTYPES - {"float16", "float64"})  # what travels in float32 without rounding

arrays = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.sampled_from(WHOLE).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    ),
    max_size=5,
)


def same(found: Arrays, wanted: Arrays) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)  # shape as well, 0-d included


@settings(max_examples=40)
@given(arrays)
@example({})
@example({"a": np.float32(3).reshape(()), "none": np.zeros((0, 3), np.int64)})
def test_what_is_packed_is_unpacked_unchanged(given: Arrays) -> None:
    packed = pack(given, Kind.MODEL)
    travelled = Packed(Manifest.parse(packed.manifest.text), packed.buffer)
    same(travelled.unpack(), given)
    assert travelled.manifest == packed.manifest


@given(hnp.arrays(np.float32, 5, elements=st.floats(-1000, 1000, width=32)))
def test_float16_halves_the_bytes_and_keeps_the_dtype(values: np.ndarray) -> None:
    packed = pack({"w": values}, Kind.MODEL, "float16")
    assert packed.raw()["w"].dtype == np.float16
    same(packed.unpack(), {"w": values.astype(np.float16).astype(np.float32)})
    long = {"w": np.zeros(800, np.float32), "n": np.zeros(100, np.int64)}
    assert len(pack(long, Kind.MODEL).buffer) == 3200 + 800
    assert len(pack(long, Kind.MODEL, "float16").buffer) == 1600 + 800  # integers stay whole


def test_bfloat16_rounds_as_torch_does() -> None:
    draws = np.random.default_rng(0)
    bits = draws.integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array([0, 2**31, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 1])
    values = np.concatenate([bits, special.astype(np.uint32)]).view(np.float32)
    wanted = torch.from_numpy(values).bfloat16()
    packed = pack({"w": values}, Kind.MODEL, "bfloat16")
    found = packed.unpack()["w"]
    np.testing.assert_array_equal(found, wanted.float().numpy())  # two NaN count as equal
    finite = np.isfinite(found)
    whole = packed.raw()["w"].view(np.int16)[finite]
    np.testing.assert_array_equal(whole, wanted.view(torch.int16).numpy()[finite])


def test_bfloat16_halves_the_bytes_and_keeps_the_dtype() -> None:
    given = {"w": np.linspace(-3, 3, 800, dtype=np.float32), "n": np.arange(100), "d": np.ones(3)}
    packed = pack(given, Kind.MODEL, "bfloat16")
    assert len(packed.buffer) == 1600 + 800 + 8  # three values of two bytes, filled up to eight
    travelled = Packed(Manifest.parse(packed.manifest.text), packed.buffer)
    assert packed.manifest.floats == "bfloat16" and travelled.manifest == packed.manifest
    found = travelled.unpack()
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in given.items()}
    np.testing.assert_allclose(found["w"], given["w"], rtol=2**-8)
    np.testing.assert_array_equal(found["n"], given["n"])
    again = lay_out(packed.manifest, packed.raw())
    assert again.buffer == packed.buffer


def test_values_that_bfloat16_cannot_hold_are_refused() -> None:
    large = pack({"w": np.array([1e38, largest("bfloat16")])}, Kind.MODEL, "bfloat16")
    large.check_finite("anna")
    for value in (3.4e38, np.inf, np.nan):
        packed = pack({"w": np.array([1, value], np.float32)}, Kind.MODEL, "bfloat16")
        with pytest.raises(NotFiniteError, match="w from anna"):
            packed.check_finite("anna")
    assert largest("bfloat16") == torch.finfo(torch.bfloat16).max
    assert largest("float16") == 65504


@settings(max_examples=25)
@given(arrays)
def test_entries_start_at_multiples_of_eight(given: Arrays) -> None:
    manifest = pack(given, Kind.MODEL).manifest
    assert all(start % ALIGN == 0 for start in manifest.offsets)
    for entry, start, end in zip(
        manifest.entries, manifest.offsets, manifest.offsets[1:], strict=False
    ):
        assert 0 <= end - start - entry.size * manifest.travels(entry).itemsize < ALIGN


def test_unpacking_a_model_copies_nothing() -> None:
    packed = pack({"w": np.ones(4, np.float32)}, Kind.MODEL)
    assert packed.unpack()["w"].base is not None
    assert not packed.unpack()["w"].flags.writeable


def test_wrong_byte_count_and_types_that_do_not_travel_are_refused() -> None:
    packed = pack({"w": np.ones(4, np.float32)}, Kind.ATOMS)
    with pytest.raises(WireError, match="atoms holds 15 bytes, but its manifest describes 16"):
        Packed(packed.manifest, packed.buffer[:-1])
    with pytest.raises(WireError, match="who is of type <U4"):
        pack({"who": np.array(["anna"])}, Kind.MODEL)
    with pytest.raises(WireError, match="z is of type complex64"):
        pack({"z": np.zeros(2, np.complex64)}, Kind.MODEL)


def test_values_that_are_not_finite_are_named() -> None:
    given = {"ok": np.ones(3, np.float32), "bad": np.array([1, np.nan], np.float32)}
    with pytest.raises(NotFiniteError, match="bad from anna"):
        pack(given, Kind.MODEL).check_finite("anna")
    too_large = pack({"w": np.array([1e6], np.float32)}, Kind.MODEL, "float16")
    with pytest.raises(NotFiniteError, match="w from anna"):
        too_large.check_finite("anna")
    wide = pack({"w": np.array([1e300])}, Kind.MODEL, "float64")
    wide.check_finite("anna")
    text = wide.manifest.text.replace('"w","float64"', '"w","float32"')  # infinite on arrival
    with pytest.raises(NotFiniteError, match="w from anna"):
        Packed(Manifest.parse(text), wide.buffer).check_finite("anna")
    pack({"n": np.array([2**62])}, Kind.MODEL).check_finite("anna")


# ---- manifests of unknown origin ---------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
almost = st.tuples(
    st.sampled_from(["model", "atoms", "images", 1, None]) | anything,
    st.sampled_from(["float32", "float16", "int64", "object"]) | anything,
    st.lists(
        st.tuples(
            st.text(max_size=3) | anything,
            st.sampled_from(["float32", "O", "bool"]) | anything,
            st.lists(st.integers(-1, 3) | anything, max_size=9) | anything,
        ),
        max_size=4,
    )
    | anything,
).map(json.dumps)


@settings(max_examples=150)
@given(st.text() | anything.map(json.dumps) | almost)
def test_any_text_is_a_manifest_or_a_wire_error(text: str) -> None:
    try:
        found = Manifest.parse(text)
    except WireError:
        return
    assert Manifest.parse(found.text) == found
    with pytest.raises(WireError):
        Packed(found, bytes(found.nbytes + 1) if found.nbytes < 1e6 else b"")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '["model","float32",' + "[" * 100_000 + "]" * 100_000 + "]",
        "9" * 100_000,
        f'["model","float32",[["w","float32",[{"9" * 5000}]]]]',
        json.dumps(["model", "float32", [["w", "float32", [1] * 9]]]),
        json.dumps(["model", "float32", [["w", "float32", [2**40]]]]),
        json.dumps(["model", "float32", [["w", "float32", [2**39] * 8]]]),
        json.dumps(["model", "float32", [["w", "float32", [1]]] * 2]),
        json.dumps(["model", "float32", [["w", "float32", [True]]]]),
        json.dumps(["model", "float32", [["w", "float32", ""]]]),
        json.dumps(["model", "float32", [["w", "float32", {}]]]),
        json.dumps(["model", "int64", []]),
        json.dumps(["model", "float32", [[str(i), "bool", []] for i in range(MAX_ENTRIES + 1)]]),
        '["model","float32",[["w","float32",[NaN]]]]',
    ],
    ids=lambda text: text[:40],
)
def test_manifests_made_to_exhaust_or_confuse_the_reader_are_refused(text: str) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        Manifest.parse(text)


def test_a_manifest_of_more_than_memory_needs_no_memory_to_refuse() -> None:
    text = json.dumps(["model", "float32", [["w", "float64", [2**19, 2**20]]]])
    with pytest.raises(WireError, match="holds 4 bytes"):
        Packed(Manifest.parse(text), b"four")


def test_an_entry_without_values_can_be_unpacked() -> None:
    text = json.dumps(["atoms", "float32", [["w", "float64", [0, 2**19, 2**20]]]])
    assert Packed(Manifest.parse(text), b"").unpack()["w"].size == 0
    text = json.dumps(["atoms", "float32", [["w", "float64", [0, 2**20, 2**20]]]])
    with pytest.raises(WireError, match="cannot be read"):  # numpy could not make the shape
        Manifest.parse(text)


# ---- rules -------------------------------------------------------------------------------------

MODEL = {"w": np.zeros((2, 3), np.float32), "n": np.zeros((), np.int64)}
LAYOUT = pack(MODEL, Kind.MODEL).manifest
TURNED = r"'model' .* it differs at w \(float32 \(3, 2\), not float32 \(2, 3\)\)\.$"
RULE = Rule(
    {"model": Kind.MODEL, "teacher/*": Kind.MODEL, "atoms": Kind.ATOMS},
    frozenset({"loss", "focus/*"}),
    {"codes": Kind.ATOMS},  # without a layout
)
ATOMS = {"x": np.zeros((7, 5), np.float32)}
LAYOUTS = {"atoms": pack(ATOMS, Kind.ATOMS).manifest}


def check(arrays: dict[str, Packed] | None = None, numbers: dict[str, Any] | None = None) -> None:
    where = "anna (source)"
    RULE.check(arrays or {}, numbers or {}, model=LAYOUT, sites=3, where=where, layouts=LAYOUTS)


def test_what_the_rule_lists_passes() -> None:
    model = pack(MODEL, Kind.MODEL)
    check(
        {"model": model, **{f"teacher/{i}": model for i in range(3)}},
        {"loss": 0.5, **{f"focus/{i}": i for i in range(3)}},
    )
    check({"model": pack(MODEL, Kind.MODEL, "float16")})
    check({"atoms": pack(ATOMS, Kind.ATOMS)})


@pytest.mark.parametrize(
    ("value", "classes", "passes"),
    [
        ([10, 0, 10, 0, 20, 20], 2, True),
        ([10, 0, 10, 0, 20], 2, False),
        ([10, 0, 10, 0, 20, -20], 2, False),
        ([10, 0, 10, 0, 20, 20.5], 2, False),
        ([10, 0, 10, 0, 20, True], 2, False),
        (10, 2, False),
        ([0] * 101 * 102, 101, False),
        ([], 0, False),
    ],
)
def test_answers_by_class_have_one_form(value: Any, classes: int, passes: bool) -> None:
    about: Any = {"model": LAYOUT, "sites": 3, "where": "east", "classes": classes}
    with nullcontext() if passes else pytest.raises(WireError, match="'answers' must be"):
        TEST.leaves.check({}, {"answers": value}, **about)
    with pytest.raises(WireError, match="no number 'answers'"):
        RULE.check({}, {"answers": value}, **about)


def test_an_array_without_a_layout_is_refused() -> None:
    with pytest.raises(WireError, match="no layout for 'codes'"):
        check({"codes": pack(ATOMS, Kind.ATOMS)})


@pytest.mark.parametrize("name", ["", "a/b", ".", "x" * 65, "a\nb"])
def test_only_the_name_of_a_site_stands_for_a_star(name: str) -> None:
    with pytest.raises(WireError, match="no number 'focus/") as caught:
        check(numbers={f"focus/{name}": 0.5})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "numbers", "message"),
    [
        ({"features": MODEL}, {}, "no array 'features'"),
        ({"model": {"z": np.zeros((50, 16), np.float32)}}, {}, "'model' is not .* differs at n"),
        (
            {"model": {**MODEL, "z": np.zeros(5, np.float32)}},
            {},
            r"at z \(float32 \(5,\), not none\)",
        ),
        ({"model": {"n": MODEL["n"], "w": MODEL["w"]}}, {}, "'model' .* in another order"),
        ({"model": {**MODEL, "w": np.zeros((3, 2), np.float32)}}, {}, TURNED),
        ({"model": {**MODEL, "w": np.zeros((2, 3))}}, {}, "'model' .* differs at w"),
        ({"teacher/anna": {"z": MODEL["w"]}}, {}, "'teacher/anna' is not this run's model"),
        ({"atoms": MODEL}, {}, "'atoms' is of kind model, the contract has atoms"),
        ({}, {"accuracy": 0.5}, "no number 'accuracy'"),
        ({}, {"loss": [0.1, 0.2]}, "'loss' must be a single number"),
        ({}, {"loss": "0.1"}, "'loss' must be a single number"),
        ({}, {"loss": True}, "'loss' must be a single number"),
        ({}, {"loss": np.float64(1)}, "'loss' must .* is a float64; give float"),
        ({}, {f"focus/{i}": 0.5 for i in range(4)}, r"4 times 'focus/\*', but the run has 3"),
        ({f"teacher/{i}": MODEL for i in range(4)}, {}, r"4 times 'teacher/\*'"),
    ],
)
def test_what_the_rule_does_not_list_is_refused_by_name(
    arrays: dict[str, Arrays], numbers: dict[str, Any], message: str
) -> None:
    packed = {name: pack(a, Kind.MODEL) for name, a in arrays.items()}
    with pytest.raises(WireError, match=rf"^anna \(source\): .*{message}"):
        check(packed, numbers)
