"""The attack on gradients: what it recovers, what it must not claim, and how it is shown."""

import ast
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fedda import models, plugins
from fedda.adversarial.discriminators import (
    Discriminator,
    DiscriminatorConfig,
    called_target,
    flat_gradient,
    gradient_penalty,
    low,
)
from fedda.algorithms import dils
from fedda.cli import app
from fedda.config import ModelConfig
from fedda.contrib.audit.finding import Audit, collect, parse
from fedda.contrib.audit.gradients import (
    HALVES,
    MOST,
    Moves,
    SumSettings,
    _others,
    attackable,
    audit,
    best_cosines,
    candidates,
    features,
    planned,
    window_gradient,
)
from fedda.contrib.audit.privacy import epsilon
from fedda.contrib.report.page import page
from fedda.contrib.report.page.noted import Noted
from fedda.errors import ConfigError, DataError
from fedda.settings import RunConfig
from fedda.train import generator
from tests.test_page import Read, results

ROOT = Path(__file__).parents[1]
D, SIZES = 24, (10, 6)
SMALL = SumSettings("dils", p=2, min_examples=16, network=DiscriminatorConfig(sizes="10,6"))
HALF = HALVES["adda", "target"]


def random_features(n: int = 64, seed: int = 0) -> Tensor:
    """Draw features like those behind a ReLU."""
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)).relu()


# ---- the attack --------------------------------------------------------------------------------


def test_one_example_is_recovered_by_hand() -> None:
    # W.grad = slope z and b.grad = slope, so their quotient is z for any slope.
    DI = Discriminator(3, ())
    z = torch.tensor([[3.0, 0.0, 4.0]])
    g = flat_gradient(called_target(DI(z)), DI)
    assert candidates(g, 3, ()).tolist() == [pytest.approx([3.0, 0.0, 4.0])]


def test_two_examples_mix_by_their_slopes_by_hand() -> None:
    DI = Discriminator(2, ())
    with torch.no_grad():
        for w in DI.parameters():
            w.zero_()
    z = torch.tensor([[2.0, 0.0], [0.0, 4.0]])  # both at a logit of 0, so both of slope 1/2
    c = candidates(flat_gradient(called_target(DI(z)), DI), 2, ())
    assert c.tolist() == [pytest.approx([1.0, 2.0])]
    assert best_cosines(z, c).tolist() == pytest.approx([1 / 5**0.5, 2 / 5**0.5])


def test_candidates_match_a_naive_loop() -> None:
    """The loop adds the slope of each example's loss at each unit."""
    DI, z = Discriminator(D, SIZES, seed=1), random_features(5)
    found = candidates(flat_gradient(called_target(DI(z)), DI), D, SIZES)
    first, *rest = DI.layers
    expected = []
    for unit in range(SIZES[0]):
        top, bottom = torch.zeros(D), 0.0
        for z_i in z:
            a = first(z_i[None]).detach().requires_grad_()
            v = a
            for layer in rest:
                v = layer(v)
            (slope,) = torch.autograd.grad(called_target(v.squeeze(1)) / len(z), a)
            top, bottom = top + slope[0, unit] * z_i, bottom + float(slope[0, unit])
        if bottom != 0:
            expected.append(top / bottom)
    assert 0 < len(expected) <= SIZES[0]
    assert torch.allclose(found, torch.stack(expected), rtol=1e-3, atol=1e-4)


def test_a_unit_that_is_active_for_one_example_reveals_it() -> None:
    """A gradient over many examples can contain one example unmixed."""
    DI, z = Discriminator(D, (2,)), random_features(40)
    z[0] = 0
    z[0, 0] = 50.0
    z[1:, 0] = 0
    first = DI.layers[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight[0] = 0
        first.weight[0, 0] = 1.0  # sees example 0 alone
        first.bias[0] = -1.0
    best = best_cosines(z, candidates(flat_gradient(called_target(DI(z)), DI), D, (2,)))
    assert best[0] == pytest.approx(1)
    assert best[1:].max() < 0.99


def test_best_cosines_by_hand() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 3.0], [0.0, 0.0]])
    c = torch.tensor([[0.0, 2.0], [5.0, 0.0], [-1.0, 0.0]])
    assert best_cosines(z, c).tolist() == pytest.approx([1, 0.5**0.5, 0])
    assert best_cosines(z, c[:0]).tolist() == [0, 0, 0]


def test_a_window_of_a_fixed_discriminator_equals_one_large_batch() -> None:
    z = random_features(12)
    parts = window_gradient(Discriminator(D, SIZES), HALF, z.split(3))
    whole = window_gradient(Discriminator(D, SIZES), HALF, [z])
    assert torch.allclose(parts, 4 * whole, rtol=1e-4, atol=1e-6)


def test_a_moving_discriminator_applies_the_last_sum_in_every_step() -> None:
    """Compared with a loop that moves the parameters by hand, as plain SGD does."""
    z, lr = random_features(6), 0.5
    DI, twin = Discriminator(D, SIZES), Discriminator(D, SIZES)
    g_sync = torch.randn(sum(w.numel() for w in DI.parameters()))
    moves = Moves(g_sync, torch.optim.SGD(DI.parameters(), lr=lr))
    found = window_gradient(DI, HALF, z.split(2), moves)
    expected = torch.zeros_like(g_sync)
    for batch in z.split(2):
        expected += flat_gradient(called_target(twin(batch)), twin)
        start = 0
        for w in twin.parameters():
            w.data -= lr * g_sync[start : start + w.numel()].view_as(w)
            start += w.numel()
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, window_gradient(Discriminator(D, SIZES), HALF, z.split(2)))


def test_a_critics_penalty_changes_only_the_gradient_of_its_weights() -> None:
    DI, z, half = Discriminator(D, SIZES, seed=3), random_features(12), HALVES["wassda", "target"]
    found = window_gradient(DI, half, [z], penalty=10, draws=generator(5))
    whole = low(DI(z)) + 10 / 2 * gradient_penalty(DI, z, generator(5))
    assert torch.allclose(found, flat_gradient(whole, DI))
    bare, start = window_gradient(DI, half, [z]), 0
    for name, w in DI.named_parameters():
        part = slice(start, start := start + w.numel())
        assert torch.equal(found[part], bare[part]) == name.endswith("bias")


# ---- the audit ---------------------------------------------------------------------------------


def by_size(found: Audit, form: str) -> dict[int, dict[str, float]]:
    """What one form of the attack recovered, by examples in a window."""
    return {
        f.examples: {"features": f.recovered[form], "cosine": f.recovered[f"{form}-cosine"]}
        for f in found.findings
        if form in f.recovered
    }


def test_few_examples_are_recovered_and_many_are_not() -> None:
    found = audit(random_features(200), SMALL, trials=2)
    bare, fixed, moving = (by_size(found, form) for form in ("bare", "fixed", "moving"))
    assert list(bare) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert bare[1]["features"] == moving[1]["features"] == 1
    assert bare[1]["cosine"] == pytest.approx(1, abs=1e-5)
    assert bare[2]["features"] > 0.4  # ten units cannot separate all pairs
    assert bare[128]["features"] < 0.02
    assert bare[128]["cosine"] < bare[8]["cosine"]
    assert all(bare[n]["features"] == pytest.approx(fixed[n]["features"]) for n in bare)


def test_windows_that_are_not_sent_are_not_attacked() -> None:
    found = audit(random_features(), SMALL, trials=1)
    sent, moving = by_size(found, "sent"), by_size(found, "moving")
    assert list(moving) == [1, 2, 4, 8, 16, 32, 64] and list(sent) == [16, 32, 64]
    assert sent == {n: moving[n] for n in sent}  # no gradient is long enough to be clipped


@pytest.mark.slow
def test_clipping_does_not_stop_the_attack_and_noise_does() -> None:
    bare = replace(SMALL, min_examples=1)
    for settings in (bare, replace(bare, clip=1e-3)):
        found = audit(random_features(), settings, trials=2)
        assert by_size(found, "sent")[1]["features"] == 1
    noisy = audit(random_features(), replace(bare, noise=0.1), trials=2)
    assert by_size(noisy, "bare")[1]["features"] == 1
    assert by_size(noisy, "sent")[1]["features"] == 0
    assert by_size(noisy, "sent")[1]["cosine"] < 0.9


def test_nearly_equal_features_do_not_count_as_recovered() -> None:
    z = torch.ones(256, D) + 0.01 * random_features(256)
    found = audit(z, SMALL, trials=2)
    assert found.findings[0].guess["features"] == 1  # cosine above .999 even without an attack
    assert found.settings["threshold"] > 0.9999
    largest = by_size(found, "bare")[256]
    assert largest["cosine"] > 0.999
    assert largest["features"] < 0.1  # it would be 0.16 if the mean did not count as a guess
    found.settings["data"] = "clinic"
    assert any("hardly tells" in line for line in found.remarks())


def test_the_attack_is_compared_with_guesses_from_the_same_data() -> None:
    z = torch.eye(D)[torch.arange(48) % D]  # each direction twice; all others are orthogonal
    found = torch.cat([_others(z, 10, generator(t)) for t in range(100)])
    # One of the 47 other features is equal; ten of the 47 are guessed.
    assert ((found - 1).abs() < 1e-6).float().mean() == pytest.approx(10 / 47, abs=0.02)
    assert found.mean() == pytest.approx(10 / 47, abs=0.02)
    assert audit(z[:D], SMALL, trials=1).findings[0].guess["cosine"] == 0


def test_the_mean_of_other_features_counts_as_a_guess() -> None:
    z = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    seen = {round(float(c), 3) for t in range(20) for c in _others(z, 2, generator(t))}
    assert 1.0 in seen  # (2, 2, 0) against (1, 0, 0) and (0, 1, 0), by their mean alone


def test_the_seed_determines_the_result() -> None:
    first, again, other = (audit(random_features(), SMALL, trials=1, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.findings != other.findings


def test_every_loss_and_a_linear_discriminator_can_be_attacked() -> None:
    for settings in (
        replace(SMALL, loss="wassda"),
        replace(SMALL, loss="wassda", penalty=10),  # the one before has no penalty
        replace(SMALL, loss="cada"),
        replace(SMALL, network=DiscriminatorConfig(sizes="")),
    ):
        found = audit(random_features(8), settings, trials=1)
        assert by_size(found, "bare")[1]["features"] == 1
    with pytest.raises(DataError, match="one feature or none"):
        audit(random_features(1), SMALL)


def test_settings_come_from_the_run_or_are_the_defaults() -> None:
    old = SumSettings.of({"method": "dils", "rounds": 3, "kd3a.vote": "soft"})
    assert (old.p, old.min_examples, old.clip, old.noise) == (4, 256, 10.0, 0.0)
    assert old == replace(SumSettings("dils"), network=dils.Config().discriminator)
    own = SumSettings.of(
        {
            "method": "dils",
            "exchange.p": 8,
            "exchange.min-examples": 64,
            "exchange.clip": 1.5,
            "exchange.noise": 0.25,
            "exchange.overlap": True,
            "dils.loss": "wassda",
            "dils.discriminator.sizes": "30,20",
            "dils.discriminator.lr": 0.01,
            "fdann.discriminator.sizes": "7",
        }
    )
    assert (own.p, own.min_examples, own.clip, own.noise) == (8, 64, 1.5, 0.25)
    assert (own.loss, own.network.hidden, own.network.lr) == ("wassda", (30, 20), 0.01)
    assert own.penalty == 0
    given = own.override({"p": 2}, "5")
    assert (given.p, given.network.hidden, given.network.lr) == (2, (5,), 0.01)
    with pytest.raises(ConfigError, match="clip, which is 0; give a clip"):
        own.override({"clip": 0.0})
    with pytest.raises(ConfigError, match="sizes"):
        own.override({}, "5,x")


@pytest.mark.parametrize(
    ("method", "given", "loss", "sizes", "penalty"),
    [
        ("dils", {}, "adda", (100, 100), 0),
        ("dils", {"dils.loss": "cada", "dils.discriminator.sizes": "5,4"}, "cada", (5, 4), 0),
        ("dils", {"dils.loss": "wassda", "dils.penalty": 3.0}, "wassda", (100, 100), 3),
        ("fdann", {"fdann.discriminator.sizes": "7"}, "grl", (7,), 0),
        ("fwdgrl", {"fwdgrl.discriminator.sizes": "", "fwdgrl.penalty": 2.0}, "wassda", (), 2),
        ("fwdgrl", {"dils.loss": "cada", "dils.discriminator.sizes": "9"}, "wassda", (100,), 0),
    ],
)
def test_the_discriminator_has_the_runs_settings(
    method: str, given: dict[str, Any], loss: str, sizes: tuple[int, ...], penalty: float
) -> None:
    found = SumSettings.of(RunConfig.parse({"method": method, **given}).flat())
    assert (found.method, found.loss, found.network.hidden) == (method, loss, sizes)
    assert found.penalty == penalty
    by_name = SumSettings.of(RunConfig.parse({"method": "fedavg", **given}).flat(), method)
    assert by_name == found


def test_every_method_with_a_discriminator_is_known() -> None:
    for method in plugins.methods():
        has_one = "discriminator" in plugins.method(method).config.model_fields
        assert (method in attackable()) == has_one
    for method in ("fdann", "fwdgrl"):
        found = SumSettings.of({"method": method})
        assert importlib.import_module(f"clients.{method}").Member.loss == found.loss


@pytest.mark.parametrize("method", sorted({*plugins.methods()} - {*attackable()}))
def test_a_method_without_a_discriminator_is_not_audited(method: str) -> None:
    refused = f"A run of {method} has no discriminator.*fwdgrl, mdan have one: give one of them"
    with pytest.raises(ConfigError, match=refused):
        SumSettings.of(RunConfig.parse({"method": method}).flat())


def test_features_come_from_the_encoder_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(ModelConfig(name="digit-cnn"), (1, 8, 8), 3, seed=0).train()
    x = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    z = features(model, x, batch=2)
    with models.evaluating(model), torch.no_grad():
        expected = model.features(x.float() / 255)
    assert z.shape == (5, model.width)
    assert sorted(z.sum(dim=1).tolist()) == pytest.approx(sorted(expected.sum(dim=1).tolist()))
    assert model.training
    monkeypatch.setattr("fedda.contrib.audit.gradients.MOST", 3)
    assert len(features(model, x)) == 3 < MOST


# ---- the command and the page ------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run's folder with a model, and data beside it."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    np.savez(tmp_path / "clinic.npz", x=rng.random((40, 12), np.float32), y=y)
    run = tmp_path / "run"
    run.mkdir()
    config = ModelConfig(name="mlp", hidden="8")
    model = models.build(config, (12,), 2, seed=0)
    names = ("cat", "dog")
    models.save(run / "model.safetensors", model, config=config, shape=(12,), classes=names)
    (run / "results.json").write_text(json.dumps(results()))
    (run / "config.json").write_text(json.dumps({"method": "dils", "rounds": 2, "exchange.p": 2}))
    return run


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["audit", "gradients", *map(str, words)])


@pytest.mark.slow
def test_the_command_and_the_report(finished: Path) -> None:
    data = finished.parent / "clinic.npz"
    words = [finished, "--data", data, "--trials", 1, "--min-examples", 8, "--sizes", "6"]
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    assert "fewer than 8 examples is not sent" in shown.stdout.replace("\n", " ")
    found = json.loads((finished / "findings.json").read_text())["gradients"]
    assert {k: found[k] for k in ("method", "p", "min-examples", "clip", "noise", "loss")} == {
        "method": "dils",
        "p": 2,
        "min-examples": 8,
        "clip": 10.0,
        "noise": 0.0,
        "loss": "adda",
    }
    assert (found["penalty"], found["network"]["sizes"], found["what-if"]) == (0, "6", True)
    assert (found["data"], found["features"], found["width"]) == ("clinic.npz", 40, 8)
    assert [row["examples"] for row in found["findings"]] == [1, 2, 4, 8, 16, 32]
    assert [row["examples"] for row in found["findings"] if "what-if" in row["recovered"]] == [
        8,
        16,
        32,
    ]
    assert CliRunner().invoke(app, ["report", str(finished)]).exit_code == 0
    read = Read((finished / "report.html").read_text())
    assert len(read.tables["Audit"]) == 1 + len(found["findings"])
    first = found["findings"][0]["recovered"]
    name, recovers, *_ = read.tables["Audit"][1]
    assert name == "features from a window of 1"
    assert recovers.startswith(f"bare {100 * first['bare']:.1f} %; fixed ")
    assert recovers.endswith(f"; norm {first['norm']:.3g}")
    numbers = read.tables["Features recovered"]
    assert [row[0] for row in numbers] == ["examples", "1", "2", "4", "8", "16", "32"]
    assert numbers[3][-1] == "–" and numbers[4][-1].endswith(" %")
    assert ("a", {"href": "#audit"}) in read.elements
    assert "A ring marks the smallest window that is sent" in read.words
    again = run(*words, "--json")
    assert json.loads(again.stdout) == {"gradients": found}


SENT, WHAT_IF = "as the run sends it", "as a run would send it"


def test_what_the_run_sent_is_distinguished_from_a_what_if(finished: Path) -> None:
    own = {"method": "dils", "exchange.min-examples": 8, "dils.discriminator.sizes": "6"}
    own |= {"fwdgrl.penalty": 10.0}
    words = [finished, "--data", finished.parent / "clinic.npz", "--trials", 1]
    for config, more, method, named, other in (
        (own, (), "dils", SENT, WHAT_IF),
        (own, ("--sizes", "6", "--method", "dils"), "dils", SENT, WHAT_IF),  # the run's own
        (own, ("--min-examples", 16), "dils", WHAT_IF, SENT),
        (own, ("--method", "fwdgrl", "--min-examples", 8), "fwdgrl", WHAT_IF, SENT),
        (
            {"method": "fedavg", "exchange.min-examples": 8},
            ("--method", "dils"),
            "dils",
            WHAT_IF,
            SENT,
        ),
    ):
        (finished / "config.json").write_text(json.dumps(config))
        shown = run(*words, *more)
        assert shown.exit_code == 0, shown.output
        found = json.loads((finished / "findings.json").read_text())["gradients"]
        assert found["method"] == method
        assert found["what-if"] == (named == WHAT_IF)
        assert ("What if: no run has sent" in shown.stdout) == found["what-if"]
        assert ("The critic's penalty" in shown.stdout) == (method == "fwdgrl")
        said = Read(page(results(), Noted(), collect(finished))).words
        assert named in said and other not in said
        assert (f"A run of {method} with the settings" in said) == found["what-if"]


def test_a_run_without_a_discriminator_is_refused(finished: Path) -> None:
    alone = finished.parent / "alone.safetensors"
    shutil.copy(finished / "model.safetensors", alone)
    (finished / "config.json").write_text(json.dumps({"method": "fdan"}))
    words = ["--data", finished.parent / "clinic.npz", "--sizes", "6", "--trials", 1]
    for what, text in (
        (finished, "A run of fdan has no"),
        (alone, "There is no config.json that says"),
    ):
        shown = run(what, *words)
        assert shown.exit_code == 1
        assert shown.stderr.startswith(f"error: {text}")
        assert (
            "dils, fada, fdann, fruda, fwdgrl, mdan have one: give one of them as --method"
            in shown.stderr
        )
        assert not (what.parent / "findings.json").exists()
    assert run(alone, *words, "--method", "dils").exit_code == 0
    found = json.loads((alone.parent / "findings.json").read_text())
    assert found["gradients"]["what-if"] is True


def test_labels_are_neither_needed_nor_read(finished: Path) -> None:
    data = finished.parent / "clinic.npz"
    with np.load(data) as file:
        np.savez(data, x=file["x"], y=np.array(["not", "a", "label"]))
    assert run(finished, "--data", data, "--trials", 1).exit_code == 0


@pytest.mark.parametrize(
    "change", [{"threshold": "<evil>"}, {"method": 1j}, {"p": None}, {"findings": []}]
)
def test_settings_in_another_format_are_left_out(tmp_path: Path, change: Any) -> None:
    found: Any = audit(random_features(4), SMALL, trials=1).to_json() | {"data": "<evil>"}
    text = json.dumps({"gradients": found | change}, default=lambda _: float("nan"))
    (tmp_path / "findings.json").write_text(text)
    html = page(results(), Noted(), collect(tmp_path))
    assert "findings.json cannot be read" in html and "<evil>" not in html


def test_names_in_an_audit_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    found = audit(random_features(4), replace(SMALL, method=evil), trials=1, what_if=True)
    (tmp_path / "findings.json").write_text(
        json.dumps({"gradients": found.to_json() | {"data": evil}})
    )
    html = page(results(), Noted(), collect(tmp_path))
    assert "A run of &lt;script&gt;" in html and evil not in html


def test_noise_is_reported_with_its_epsilon(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [finished, "--data", finished.parent / "clinic.npz", "--trials", 1, "--noise", 2]
    shown = run(*words, "--windows", 30, "--json")
    assert shown.exit_code == 0, shown.output
    (audited,) = parse(json.loads(shown.stdout))
    found = audited.settings
    assert found["privacy"] == {
        "delta": 1e-5,
        "windows": 30,
        "one": {"presence": epsilon(2, 1), "replacement": epsilon(1, 1)},
        "all": {"presence": epsilon(2, 30), "replacement": epsilon(1, 30)},
    }
    text = " ".join(audited.remarks())
    assert f"epsilon {epsilon(2, 1):.3g} for one window" in text
    assert "an example has the site's epsilon and none of its own" in text
    assert "takes nothing from this attack" not in text
    # 2 * 10 * sqrt(P) by hand, P = 8 * 100 + 100 + 100 * 100 + 100 + 100 + 1
    assert found["parameters"] == 11101
    assert "Noise on 11,101 values has a norm of 2.11e+03" in text
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.delitem(sys.modules, "dp_accounting.gaussian_mechanism", raising=False)
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    assert "fedda[privacy]" in shown.stdout.replace("\n", "")


def test_windows_of_a_training_by_hand() -> None:
    # 1,200 examples in batches of 50, two rounds an epoch: 12 steps a round, 3 windows of 4.
    config = {"method": "fdann", "rounds": 5, "train.batch-size": 50}
    config |= {"train.rounds-per-epoch": 2.0}
    assert planned(config, {"sites": [{"examples": 1200}, {"examples": 900}]}, 4) == 15
    assert planned({"method": "fdann"}, {}, 4) == 1


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        # 600 examples in batches of 32: 19 steps a round, 3 windows of 8, the last one padded.
        ({"method": "fdann"}, 30),
        ({"method": "fdann", "fdann.pairs": True}, 90),  # the target sums with each of 3 sources
        # The critic takes five times as many steps.
        ({"method": "fwdgrl", "fwdgrl.critic-steps": 5}, 150),
        # 6 rounds of 3 times 19 steps; windows continue from round to round.
        ({"method": "dils", "dils.pretrain": 4}, 42),
        # For every step 5 windows of 8 steps of the critic.
        (
            {"method": "dils", "dils.pretrain": 4, "dils.loss": "wassda", "dils.critic-steps": 5},
            1710,
        ),
        # 5 rounds of 3 times 19 steps are 35 windows; 3 critics before them and 1 after them.
        ({"method": "fruda", "fruda.pretrain": 4, "fruda.measure.steps": 100}, 435),
    ],
)
def test_windows_of_each_method_by_hand(settings: dict[str, Any], windows: int) -> None:
    config = {"rounds": 10, "train.batch-size": 32} | settings
    sites = [{"role": "source", "examples": 600}] * 3 + [{"role": "target", "examples": 500}]
    assert planned(config, {"sites": sites}, 8) == windows


def test_what_cannot_be_audited_is_refused(finished: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 13), np.float32))
    for words, text in (
        ((tmp_path, "--data", tmp_path / "wide.npz"), "holds no model.safetensors"),
        ((finished, "--data", tmp_path / "wide.npz"), "examples of 13 and the model takes 12"),
        ((finished, "--data", tmp_path / "gone"), "does not exist"),
        ((finished, "--data", tmp_path / "wide.npz", "--clip", 0, "--noise", 1), "give a clip"),
    ):
        shown = run(*words)
        assert shown.exit_code == 1
        assert shown.stderr.startswith("error: ")
        assert text in shown.stderr
    assert not (finished / "findings.json").exists()


def test_the_help_text_loads_no_heavy_module() -> None:
    tree = ast.parse((ROOT / "fedda/contrib/audit/attacks.py").read_text())
    eager = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}  # none for types only
    assert "fedda.errors" in eager
    assert not eager & {
        "torch",
        "fedda.contrib.audit.gradients",
        "fedda.contrib.audit.subject",
        "fedda.models",
        "fedda.contrib.audit.privacy",
    }
