"""A site trains only models that honest rounds can have made of a first one that it knows."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.site import boundary, origin
from clients.site.memory import Site
from clients.site.request import Request
from fedda import models
from fedda.errors import Code, OriginError, PolicyError
from fedda.settings import Task
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind
from tests.asking import SOURCES, make_source, task_of
from tests.federation import Federation, final_model, rounds

SETTINGS = {
    "method": "fedavg",
    "rounds": 40,
    "model.name": "digit-cnn",
    "model.hidden": "32",
    "train.batch-size": 16,
    "train.steps": 0,
}


REAL = {"min-images": 16, "audited": True}  # as of `fedda-client`, for a small site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_source(tmp_path, 80, **REAL)


def drawn(task: Task, seed: int = 0) -> Arrays:
    return models.to_arrays(models.build(task.model, task.dims, task.classes, seed))


def asked(task: Task, values: Arrays, server_round: int = 1, floats: str = "float32") -> Request:
    sent = {"model": packing.pack(values, Kind.MODEL, floats)}
    heading = {"phase": "train", "hop": "train", "part": "source", "round": server_round}
    return Request.make(task.flat(), heading, sent)


def serve(site: Site, request: Request) -> Arrays:
    boundary.admit(site, request, test=False)
    arrays, _ = SOURCES["fedavg"](site).serve(request)
    return arrays["model"].unpack()


def moved(values: Arrays, name: str, by: float, rows: int | None = 1) -> Arrays:
    """The same model with the first row of a tensor moved so far, or more of its rows together."""
    changed = {n: a.copy() for n, a in values.items()}
    part = changed[name][:rows]
    part += by / np.sqrt(part.size)
    return changed


def changed(values: Arrays, name: str, by: float) -> Arrays:
    return values | {name: (values[name] + by).astype(values[name].dtype)}


def test_how_far_a_row_is_by_hand() -> None:
    first = {
        "w": np.array([[3.0, 4.0], [0.1, 0.0]], np.float32),  # rows of length 5 and .1
        "b": np.array([0.0, -4.0], np.float32),
    }
    gone = {"w": first["w"] + [[0, 50], [0, 10]], "b": first["b"] + [1, 4]}
    # 50 of 3 * 5, 10 of 3 * 1, 1 of 2 * 1, 4 of 2 * 4
    assert origin.farthest(gone, first) == (pytest.approx(50 / 15), "w")
    assert origin.farthest({"b": gone["b"]}, first) == (0.5, "b")
    assert origin.farthest(first, first) == (0.0, "")
    assert origin.distances({"b": gone["b"]}, first) == {"b": pytest.approx(17**0.5)}


def test_nan_is_never_near() -> None:
    first = {"b": np.zeros(2, np.float32)}
    beyond, _ = origin.farthest({"b": np.array([np.nan, 0], np.float32)}, first)
    assert not beyond <= 1


def test_the_first_model_is_the_one_that_the_site_draws(site: Site) -> None:
    task = task_of(site, SETTINGS)
    assert serve(site, asked(task, drawn(task)))
    for other in (drawn(task, seed=1), moved(drawn(task), "head.weight", 0.01)):
        with pytest.raises(OriginError, match="--start-from FILE"):
            serve(site, asked(task, other))


@pytest.mark.parametrize("floats", ["bfloat16", "int8"])
def test_a_rounded_first_model_is_the_same(site: Site, floats: str) -> None:
    task = task_of(site, SETTINGS | {"wire.dtype": floats})
    assert serve(site, asked(task, drawn(task), floats="bfloat16"))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_what_is_drawn(site: Site, threads: int) -> None:
    task, before = task_of(site, SETTINGS), torch.get_num_threads()
    expected = drawn(task)
    torch.set_num_threads(threads)
    try:
        found = drawn(task)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(found[n], expected[n]) for n in expected)


def test_a_file_of_the_operators_may_be_the_first_model(tmp_path: Path) -> None:
    own: dict[str, Any] = REAL | {"start-from": str(tmp_path / "m.safetensors")}
    site = make_source(tmp_path, 80, **own)
    task = task_of(site, SETTINGS)
    model = models.build(task.model, task.dims, task.classes, 5)
    models.save(
        tmp_path / "m.safetensors", model, config=task.model, inputs=task.inputs, classes=task.names
    )
    assert serve(site, asked(task, models.to_arrays(model)))
    assert serve(site, asked(task, drawn(task)))  # other runs begin as ever
    with pytest.raises(OriginError):
        serve(site, asked(task, drawn(task, seed=1)))


def test_a_later_model_is_no_farther_than_training_goes(site: Site) -> None:
    task = task_of(site, SETTINGS)
    assert serve(site, asked(task, moved(drawn(task), "head.weight", 3), 2))
    for made in (moved(drawn(task), "head.weight", 4), moved(drawn(task), "head.bias", 3)):
        with pytest.raises(OriginError, match=r"head\..* times as far"):
            serve(site, asked(task, made, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("running_mean", 0.01), ("running_var", 0.5), ("running_mean", 1e3), ("running_var", 1e-30)],
)
def test_the_first_models_statistics_are_the_sites_own(site: Site, name: str, value: float) -> None:
    """By them a layer is dead, or tells images apart by a threshold, wherever it is not trained."""
    task = task_of(site, SETTINGS)
    made = drawn(task)
    made[next(n for n in made if n.endswith(name))] += value - (name == "running_var")
    with pytest.raises(OriginError, match="--start-from FILE"):
        serve(site, asked(task, made))


@pytest.mark.parametrize("value", [1e30, -1e30])
def test_later_statistics_are_of_a_size_that_data_has(site: Site, value: float) -> None:
    task = task_of(site, SETTINGS)
    for name in [n for n in drawn(task) if "running_" in n]:
        assert serve(site, asked(task, changed(drawn(task), name, 50.0), 2))
        with pytest.raises(OriginError, match=f"{name}.*times as far"):
            serve(site, asked(task, changed(drawn(task), name, value), 2))


def test_what_no_training_changes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the masks and tables of positions in some networks of other packages."""

    def masked(*args: Any, **more: Any) -> models.Model:
        made = build(*args, **more)
        made.head.register_buffer("mask", torch.zeros(3))
        made.head.register_buffer("place", torch.arange(3))
        return made

    build, site = models.build, make_source(tmp_path, 80, **REAL)
    monkeypatch.setattr(models, "build", masked)
    task = task_of(site, SETTINGS)
    assert site.origin is not None
    for begun in (1, 2):
        site.origin.check(asked(task, drawn(task), begun))
        for name in ("head.mask", "head.place"):
            with pytest.raises(OriginError):
                site.origin.check(asked(task, changed(drawn(task), name, 1), begun))


def test_a_mean_goes_no_farther_than_some_times_ones_own_longest_round(
    site: Site, tmp_path: Path
) -> None:
    task = task_of(site, SETTINGS)
    trained = serve(site, asked(task, drawn(task)))
    name = "encoder.hidden.0.weight"
    went = origin.distances(trained, drawn(task))[name]
    task_of_server = dict(trained)
    far = moved(drawn(task), name, 8 * went, None)
    with pytest.raises(OriginError, match=name):
        serve(site, asked(task, far, 2))
    assert serve(site, asked(task, task_of_server, 2))
    # After rounds away the mean may have gone farther; the state is also there after a restart.
    fresh = make_source(tmp_path, 80, **REAL)
    with pytest.raises(OriginError, match=name):
        serve(fresh, asked(task, moved(trained, name, 14 * went, None), 4))
    assert serve(fresh, asked(task, moved(trained, name, 8 * went, None), 4))


def test_rounds_that_count_backwards_are_compared_as_well(site: Site, tmp_path: Path) -> None:
    task, name = task_of(site, SETTINGS), "encoder.hidden.0.weight"
    model = before = drawn(task)
    longest = 0.0
    for n in range(1, 13):
        before, model = model, serve(site, asked(task, model, n))
        longest = max(longest, origin.distances(model, before)[name])
    for n in (11, 5, 2):  # as many rounds apart, and eight at most, are as far as it may be
        away = np.random.default_rng(n).standard_normal(before[name].shape, np.float32)
        away *= 7 * longest * min(12 - n, 8) / np.linalg.norm(away)
        far = before | {name: before[name] + away}
        with pytest.raises(OriginError, match=name):
            serve(site, asked(task, far, n))
    assert serve(site, asked(task, model, 11))
    # The same run once more begins at its first round, also where this site joins it later.
    assert serve(site, asked(task, drawn(task), 1))
    fresh = make_source(tmp_path, 80, **REAL)
    assert serve(fresh, asked(task, model, 3))


@pytest.mark.parametrize("before", ["nothing", "another network"])
def test_a_round_that_is_answered_by_numbers_counts_too(site: Site, before: str) -> None:
    """It draws no first model, so the process has none then, or that of another training."""
    assert site.origin is not None
    if before != "nothing":
        other = task_of(site, SETTINGS | {"model.name": "mlp"})
        assert serve(site, asked(other, drawn(other)))
    task, name = task_of(site, SETTINGS), "encoder.hidden.0.weight"
    after = models.build(task.model, task.dims, task.classes, seed=0)
    models.load_arrays(after, moved(drawn(task), name, 0.5, None))
    site.origin.follow(asked(task, drawn(task)), after)
    site.origin.check(asked(task, moved(drawn(task), name, 2.9, None), 2))  # of 6 times .5
    with pytest.raises(OriginError, match=name):
        site.origin.check(asked(task, moved(drawn(task), name, 3.1, None), 2))


def test_another_training_of_the_same_name_is_not_compared(site: Site) -> None:
    task = task_of(site, SETTINGS)
    serve(site, asked(task, drawn(task)))
    other = task_of(site, SETTINGS | {"model.hidden": "16"})
    assert serve(site, asked(other, drawn(other)))


def test_what_is_answered_by_numbers_is_not_checked_here(site: Site) -> None:
    task = task_of(site, SETTINGS)
    sent = {"model": packing.pack(moved(drawn(task), "head.weight", 50), Kind.MODEL)}
    heading = {"phase": "train", "hop": "test", "part": "target", "round": 1}
    site.origin.check(Request.make(task.flat(), heading, sent))  # type: ignore[union-attr]


def test_an_encoder_that_stays_after_a_test_is_checked(site: Site) -> None:
    """FedDaDiL's target learns atoms with the encoder that came with a test of others."""
    task = task_of(site, SETTINGS | {"method": "feddadil"})
    atoms = packing.pack({"z": np.zeros((2, 9, 32), np.float32)}, Kind.ATOMS)
    heading = {"phase": "dictionary", "hop": "test", "part": "target", "round": 40}
    assert site.origin is not None
    for by in (0, 50):
        made = packing.pack(moved(drawn(task), "head.weight", by), Kind.MODEL)
        request = Request.make(task.flat(), heading, {"model": made, "atoms": atoms})
        with pytest.raises(OriginError) if by else nullcontext():
            site.origin.check(request)


def test_a_run_of_many_classes_that_nobody_has_is_refused(site: Site) -> None:
    made = {"class-names": "\n".join(map(str, range(1000)))}
    task = Task.parse(task_of(site, SETTINGS).flat() | made)
    with pytest.raises(PolicyError, match="names 1000 classes, and this site has 3"):
        serve(site, asked(task, drawn(task)))


# ---- over processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_from_a_file_needs_the_word_of_each_site(hub: Federation, tmp_path: Path) -> None:
    first, usual = tmp_path / "first.safetensors", hub.client_options["anna"]
    run = {"method": "fedavg", "rounds": 1, "run.evaluate": False, "wait.tries": 1}
    made = hub.alone("first", run | {"run.seeds": "3"})
    first.write_bytes(final_model(made, "fedavg"))
    try:
        hub.processes["anna"].stop()
        hub.client_options["anna"] = [*usual, "--start-from", str(first)]
        hub.start_site("anna")
        hub.wait_for_sites()
        begun = hub.begin("second", run | {"run.start-from": str(first), "wait.settle": 0.0})
        results = begun.finish()
    finally:
        hub.processes["anna"].stop()
        hub.client_options["anna"] = usual
        hub.start_site("anna")
        hub.wait_for_sites()
    assert set(rounds(results, "fedavg")[1]["weights"]) == {"anna"}
    failed = {(e["site"], e["text"]) for e in begun.find("trouble", what="failed")}
    assert failed == {(name, Code.ORIGIN.public) for name in ("bert", "carl")}
