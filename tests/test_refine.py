"""The local last step: its formula, the model that it makes, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedda
from fedda import models, refining
from fedda.cli import app
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import ModelError, RefineError
from fedda.maths import refine
from fedda.maths.refine import WEIGHTS, Gaussians, Shares, Space, Strength
from fedda.models import Model, refined
from fedda.results.remarks import refined_file
from fedda.train import generator
from tests.reference import refine as twin

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model_name": "mlp",
    "model_hidden": "16",
    "train_batch_size": 64,
    "quiet": True,
}


def clouds(n: int = 120, seed: int = 0, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in [0, 1] around three points, labels."""
    draws = np.random.default_rng(seed)
    y = np.arange(n) % 3
    centres = np.random.default_rng(7).uniform(0.3, 0.7, (3, 12))
    x = centres[y] + shift + draws.normal(0, 0.15, (n, 12))
    return x.clip(0, 1).astype(np.float32), y


def sites(n: int = 120) -> dict[str, Any]:
    return {
        "a": clouds(n, 1),
        "b": clouds(n, 2),
        "t": (clouds(n, 3, 0.1)[0], None, clouds(60, 4, 0.1)),
    }


def drawn(n: int, d: int, C: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (n, d) and predictions (n, C) that know a little of their classes."""
    draws = np.random.default_rng(seed)
    y = draws.integers(0, C, n)
    x = draws.normal(size=(n, d)) + 2 * draws.normal(size=(C, d))[y]
    p = 0.4 * np.eye(C)[y] + 0.6 * draws.dirichlet(np.ones(C), n)
    return torch.tensor(x), torch.tensor(p)


# ---- the formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", ["careful", "strong"])
@pytest.mark.parametrize("shares", ["auto", "even", "estimated"])
@pytest.mark.parametrize(("n", "d", "C"), [(60, 5, 2), (90, 40, 4), (200, 100, 3)])
def test_it_is_what_a_naive_twin_computes(
    strength: Strength, shares: Shares, n: int, d: int, C: int
) -> None:
    x, p = drawn(n, d, C)
    z = Space.of(x)(x)
    other = p ** torch.tensor([0.5, *[1.0] * (C - 1)])
    other /= other.sum(dim=1, keepdim=True)
    beta = refine.shown(p, other)
    assert beta == pytest.approx(twin.shown(p.tolist(), other.tolist()), abs=1e-12)
    assert refine.evidence(other) == pytest.approx(twin.evidence(other.tolist()), abs=1e-12)
    q, _ = refine.refine(p, z, strength, shares, beta)
    expected = twin.refine(p.tolist(), x.tolist(), *WEIGHTS[strength], shares, beta)
    assert q.numpy() == pytest.approx(np.array(expected), abs=1e-9)


def test_an_answer_by_hand() -> None:
    """Means at -1 and 1, a variance of 1: half a unit from the middle is worth one nat."""
    found = Gaussians(torch.tensor([[-1.0], [1.0]]), torch.eye(1), torch.zeros(2), 1.0)
    even, known = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]])
    z = torch.tensor([[0.5]])
    assert found.logits(z, even).softmax(1)[0, 1].item() == pytest.approx(1 / (1 + np.exp(-1)))
    odds = 0.2 / 0.8 * np.exp(1)
    assert found.logits(z, known).softmax(1)[0, 1].item() == pytest.approx(odds / (1 + odds))


def test_shares_count_by_the_evidence_for_them() -> None:
    even = torch.full((100, 2), 0.5).double()
    assert refine.offset(even).tolist() == [0.0, 0.0]
    rare = torch.tensor([[0.9, 0.1]] * 90 + [[0.1, 0.9]] * 10).double()
    full = refine.offset(rare)  # the mean is (.82, .18), .22 nats from even
    assert full.exp().tolist() == pytest.approx([90.3 / 100.6, 10.3 / 100.6])
    assert refine.offset(rare, "even").tolist() == [0.0, 0.0]
    some = torch.tensor([[0.9, 0.1]] * 70 + [[0.1, 0.9]] * 30).double()
    divergence = 0.66 * np.log(1.32) + 0.34 * np.log(0.68) - 1 / 200
    expected = divergence / 0.1 * np.log([70.3 / 100.6, 30.3 / 100.6])
    assert refine.offset(some).tolist() == pytest.approx(expected)
    assert refine.offset(some, "estimated").exp().sum().item() == pytest.approx(1.0)


def test_shares_count_as_far_as_both_models_see_the_same_ones() -> None:
    def seen(*mean: float) -> Tensor:
        return torch.tensor([mean]).double()

    even = 1 / 3
    one, other = seen(even + 0.2, even, even - 0.2), seen(even + 0.2, even - 0.1, even - 0.1)
    # (.2 * .2 + .2 * .1) / (.2 sqrt(2) * .1 sqrt(6))
    assert refine.alike(one, other) == pytest.approx(np.sqrt(3) / 2)
    assert refine.alike(one, seen(even - 0.1, even + 0.2, even - 0.1)) == 0  # another class
    assert refine.alike(one, seen(even, even, even)) == pytest.approx(0, abs=1e-6)
    two = seen(0.6, 0.4).repeat(99, 1)
    assert refine.shown(two, 1 - two) == refine.evidence(two)  # of two classes nobody can say
    much, less = seen(0.6, 0.2, 0.2).repeat(999, 1), seen(0.36, 0.32, 0.32).repeat(999, 1)
    assert refine.evidence(much) == 1 and refine.alike(much, less) == pytest.approx(1)
    # .36 ln 1.08 + .64 ln .96 is .00158 nats, less .001 by chance: 5 times .0058
    assert refine.shown(much, less) == pytest.approx(5 * (0.00158 - 0.001) / 0.1, rel=0.02)
    assert refine.shown(much, seen(0.2, 0.6, 0.2).repeat(999, 1)) == 0
    rare = torch.tensor([[0.9, 0.1]] * 90 + [[0.1, 0.9]] * 10).double()
    assert refine.offset(rare, beta=0.3).tolist() == pytest.approx(
        (0.3 * refine.offset(rare)).tolist()
    )
    assert refine.offset(rare, "estimated", 0.3).tolist() == refine.offset(rare).tolist()


def test_a_class_that_is_missing_takes_few_images() -> None:
    """Without shares, the Gaussian of a class that nobody is in takes others' images."""
    x, p = drawn(300, 20, 6, seed=2)
    gone = p.argmax(dim=1) < 3
    x, p = x[gone], p[gone]
    z = Space.of(x)(x)
    lost = {
        s: int((refine.refine(p, z, "careful", s)[0].argmax(dim=1) >= 3).sum())
        for s in ("even", "auto")
    }
    assert lost["auto"] <= lost["even"]
    assert lost["auto"] <= 0.02 * len(x)


def test_many_columns_are_reduced_alike_in_every_run() -> None:
    x = torch.randn(1100, 1100, generator=generator("wide")).double()
    before = torch.random.get_rng_state()
    one, two = Space.of(x), Space.of(x)
    assert torch.equal(one.axes, two.axes)
    assert torch.equal(before, torch.random.get_rng_state())
    assert one.axes.T @ one.axes == pytest.approx(torch.eye(64).double(), abs=1e-6)


# ---- the model ---------------------------------------------------------------------------------


def network(seed: int, shape: tuple[int, ...] = (12,), **config: Any) -> tuple[Model, ModelConfig]:
    made = ModelConfig.model_validate({"name": "mlp", "hidden": "16", **config})
    return models.build(made, shape, 3, seed), made


def test_it_is_kept_and_read_as_other_models_are(tmp_path: Path) -> None:
    x = torch.tensor(clouds()[0])
    (first, config), (second, _) = network(3), network(1)
    made = refining.refined_model(first, second, x, config, (12,))
    models.save(
        tmp_path / "m.safetensors",
        made.model,
        config=config,
        inputs=Inputs((12,)),
        classes=("a", "b", "c"),
    )
    loaded, meta = models.load(tmp_path / "m.safetensors")
    assert meta.extension is not None and meta.extension.method == "refine"
    assert torch.equal(models.predict(loaded, x), models.predict(made.model, x))
    torch.testing.assert_close(models.predict(loaded, x).double(), made.after, atol=1e-5, rtol=0)
    alone = torch.cat([models.predict(loaded, one[None]) for one in x[:5]])
    torch.testing.assert_close(alone, models.predict(loaded, x)[:5])
    assert len(refined.members_of(loaded)) == 3


def test_images_are_told_apart_by_the_last_members_features(tmp_path: Path) -> None:
    x = torch.randint(0, 255, (60, 1, 8, 8), dtype=torch.uint8, generator=generator("images"))
    made, config = network(0, (1, 8, 8), name="digit-cnn", hidden="")
    other, _ = network(1, (1, 8, 8), name="digit-cnn", hidden="")
    kept = refining.refined_model(other, made, x, config, (1, 8, 8))
    assert len(refined.members_of(kept.model)) == 3  # with the target's statistics, too
    answers = models.predict(kept.model, x)
    torch.testing.assert_close(answers.double(), kept.after, atol=1e-4, rtol=0)
    space = Space.of(refining.features_of(made, x))
    torch.testing.assert_close(space.axes.float(), kept.model.head.axes)


def test_the_targets_statistics_are_those_of_its_images() -> None:
    x = torch.tensor(clouds()[0])
    model, _ = network(0)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    own = refining.with_own_statistics(model, x)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    changed = [n for n, t in own.state_dict().items() if not torch.equal(t, before[n])]
    assert changed and all("running_" in n for n in changed)


def test_what_a_shift_makes_of_one_model_is_not_taken_for_uneven_classes() -> None:
    """All columns move, so the model gives one class most images; its own statistics mend that."""
    x, y = (torch.tensor(part) for part in clouds(300))
    model, config = network(3)
    steps = torch.optim.Adam(model.parameters(), 0.02)
    model.train()
    for _ in range(40):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        steps.step()
    model.eval()
    moved = x + torch.linspace(-2, 2, 12)
    before = models.predict(model, moved).argmax(dim=1)
    assert refine.evidence(models.predict(model, moved)) == 1  # one class has nearly all
    made = refining.refined_model(None, model, moved, config, (12,))
    assert len(refined.members_of(made.model)) == 2  # also with its own statistics
    assert made.model.head.get_buffer("offset").abs().max() < 0.1
    right = [float((q == y).double().mean()) for q in (before, made.after.argmax(dim=1))]
    assert right[1] > right[0] + 0.2


def test_a_small_model_learns_the_answers() -> None:
    x = torch.tensor(clouds(300)[0])
    model, config = network(3)
    made = refining.refined_model(None, model, x, config, (12,))
    small = refining.distilled(made, x)
    assert set(small.state_dict()) == set(model.state_dict())
    told = made.after.argmax(dim=1)
    same = float((models.predict(small, x).argmax(dim=1) == told).double().mean())
    before = float((models.predict(model, x).argmax(dim=1) == told).double().mean())
    assert same > before


# ---- where nothing can be learnt ---------------------------------------------------------------


def test_where_nothing_can_be_learnt_it_says_why() -> None:
    model, config = network(3)
    x = torch.tensor(clouds()[0])

    def refused(x: Tensor) -> str:
        with pytest.raises(RefineError) as caught:
            refining.refined_model(None, model, x, config, (12,))
        return str(caught.value)

    assert "has 39 examples" in refused(x[:39])
    with torch.no_grad():
        model.head.bias[1] = 1e4
    assert "the same class" in refused(x)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert "no probabilities" in refused(x)
    with pytest.raises(ValueError, match="the same features"):
        Space.of(torch.ones(60, 5))


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    model, config = network(0)
    for settings in ({"members": [None] * 99}, {"members": [{"method": "refine", "settings": {}}]}):
        held = {"of": "inputs", "width": 12, "components": 3, "w": 1.0} | settings
        with pytest.raises(ModelError, match="members"):
            models.blank(config, (12,), 3, models.Extension("refine", held))
    assert model.width == 16


# ---- a run -------------------------------------------------------------------------------------


def test_a_run_refines_at_the_target_and_sends_nothing_more(tmp_path: Path) -> None:
    made = {
        how: fedda.simulate(
            sites(), "t", "kd3a", dir=tmp_path / how, baseline="fedavg", run_refine=how, **SETTINGS
        )
        for how in ("none", "careful")
    }
    plain, run = (made[how].results for how in ("none", "careful"))
    assert all(t.refined is None for t in plain.trainings)
    for before, after in zip(plain.trainings, run.trainings, strict=True):
        assert before.accuracy == after.accuracy  # training and its test are as before
        arrays = [{k: v for k, v in t.bytes.items() if "scalars" not in k} for t in (before, after)]
        assert arrays[0] == arrays[1]
    for method in ("fedavg", "kd3a"):
        (told,) = run.raw["trainings"][method]
        assert set(told["refined"]) == {"accuracy", "changed", "agreed"}
        kept = tmp_path / "careful" / "sites" / refined_file(run.raw, told)
        model, _ = models.load(kept)
        assert len(refined.members_of(model)) == (2 if method == "fedavg" else 3)
        x, y = clouds(60, 4, 0.1)
        right = models.predict(model, torch.tensor(x)).argmax(dim=1).numpy() == y
        assert told["refined"]["accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    assert not list((tmp_path / "none").rglob("*refined*"))


LAB = pytest.mark.nightly("fedda/contrib/lab/comparison", "fedda/library")


@pytest.mark.contrib
@pytest.mark.parametrize(
    "method", ["kd3a,train.lr=.05", *(pytest.param(m, marks=LAB) for m in ("kd3a", "adabn"))]
)
def test_a_comparisons_training_is_refined_as_a_runs_is(method: str, tmp_path: Path) -> None:
    """Whether or not FedAvg is compared, its model of the seed takes part in the last step."""
    name, _, own = method.partition(",")
    more: dict[str, Any] = SETTINGS | ({"train_lr": 0.05} if own else {})
    run = fedda.simulate(sites(), "t", name, seeds=(3,), dir=tmp_path / "run", **more)
    kept = (
        tmp_path
        / "run"
        / "sites"
        / refined_file(run.results.raw, run.results.raw["trainings"][name][0])
    )
    expected, _ = models.load(kept)
    for baseline in ("none", "fedavg"):
        place = tmp_path / baseline
        found = fedda.compare(
            sites(), [method], "t", seeds=(3,), dir=place, baseline=baseline, **SETTINGS
        )
        score = next(s for s in found.scores if s.variant != "FedAvg")
        assert score.refined == run.results.of(name)[0].refined
        assert len(found.scores) == (1 if baseline == "none" else 2)
        (file,) = place.glob(f"cells/{name}*/sites/t/*.refined.safetensors")
        made, _ = models.load(file)
        assert len(refined.members_of(made)) == 3
        for one, other in zip(
            made.state_dict().values(), expected.state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)


def test_a_target_without_tests_says_no_accuracy(tmp_path: Path) -> None:
    unlabelled = sites() | {"t": (clouds(120, 3, 0.1)[0], None)}
    run = fedda.simulate(unlabelled, "t", "fedavg", dir=tmp_path / "r", **SETTINGS)
    (told,) = (t["refined"] for t in run.results.raw["trainings"]["fedavg"])
    assert set(told) == {"changed", "agreed"}


def test_a_small_target_keeps_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = sites() | {"t": (clouds(30, 3)[0], None, clouds(30, 4))}
    run = fedda.simulate(small, "t", "fedavg", dir=tmp_path / "r", **SETTINGS)
    assert run.results.trainings[0].accuracy is not None
    assert run.results.trainings[0].refined is None
    assert "the last step needs 40 or more" in caplog.text


STAYING: list[tuple[str, dict[str, Any]]] = [
    ("shot", {}),
    ("decision", {}),
    ("autodial", {}),
    ("dils", {"collaborator": "a", "pretrain": 1}),
    ("feddadil", {"predict": "ensemble", "samples": 128, "batch_size": 64}),
    ("feddadil", {"predict": "reconstruction", "samples": 128, "batch_size": 64}),
    ("fada", {"layers_disentangler": "12,10"}),
]


def once_changed(method: str, settings: dict[str, Any]) -> Any:
    """One kind of models in the gate; those of the other methods once their files change."""
    own = (f"clients/{method}.py", f"strategies/{method}.py", f"fedda/contrib/methods/{method}")
    marks = [] if method == "shot" else [pytest.mark.nightly("clients/site/last_step.py", *own)]
    return pytest.param(method, settings, marks=marks)


@pytest.mark.parametrize(("method", "settings"), [once_changed(*each) for each in STAYING])
def test_models_that_stay_at_the_target_are_refined(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    every: dict[str, Any] = SETTINGS | settings | {"rounds": 3}
    if method in ("dils", "fada"):
        every |= {"exchange_p": 1, "exchange_min_examples": 1, "exchange_expose_features": True}
    run = fedda.simulate(sites(), "t", method, dir=tmp_path / "r", **every)
    training = run.results.of(method)[0]
    (told,) = run.results.raw["trainings"][method]
    assert training.refined is not None and told["refined"]["changed"] <= 1
    model, _ = models.load(tmp_path / "r" / "sites" / refined_file(run.results.raw, told))
    x, y = clouds(60, 4, 0.1)
    answers = models.predict(refined.members_of(model)[-1], torch.tensor(x)).argmax(dim=1).numpy()
    assert float((answers == y).mean()) == pytest.approx(training.accuracy, abs=1e-6)


# ---- the command -------------------------------------------------------------------------------


def invoke(*words: str) -> str:
    """What a command of `fedda` writes, which must succeed."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.contrib
def test_the_command_refines_a_finished_run(tmp_path: Path) -> None:
    made = fedda.simulate(sites(), "t", "kd3a", dir=tmp_path / "r", baseline="fedavg", **SETTINGS)
    town = tmp_path / "r" / "data" / "t.npz"
    said = invoke("refine", str(tmp_path / "r"), "--data", str(town))
    assert "3 models agree on" in said and "labelled tests" in said
    run = json.loads((tmp_path / "r" / "results.json").read_text())
    (told,) = run["trainings"]["kd3a"]
    loaded, _ = models.load(tmp_path / "r" / "refined.safetensors")
    kept, _ = models.load(tmp_path / "r" / "sites" / refined_file(run, told))
    for (name, one), other in zip(
        loaded.state_dict().items(), kept.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)
    small = tmp_path / "small.safetensors"
    invoke("refine", str(tmp_path / "r"), "--data", str(town), "--linear", "--out", str(small))
    assert models.describe(small).extension is None
    with np.load(next((tmp_path / "r" / "sites" / "t").rglob("*kd3a-0/refined.npz"))) as noted:
        changed = int((noted["before"] != noted["after"]).sum())
    invoke("report", str(tmp_path / "r"))
    page = (tmp_path / "r" / "report.html").read_text()
    assert f"{changed} answers with a ring are others than before" in page
    alone = str(tmp_path / "r" / "fedavg-0" / "model.safetensors")
    assert "2 models agree on" in invoke("refine", alone, "--data", str(town))
    assert made.results.accuracy is not None
