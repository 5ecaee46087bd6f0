"""The attack on gradients: what it recovers, what it must not claim, and how it is shown."""

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedda import models, plugins
from fedda.adversarial.discriminators import (
    Discriminator,
    DiscriminatorConfig,
    called_target,
    flat_gradient,
)
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.contrib.audit.finding import Audit, collect
from fedda.contrib.audit.gradients import (
    HALVES,
    SumSettings,
    attackable,
    audit,
    best_cosines,
    candidates,
    planned,
    window_gradient,
)
from fedda.contrib.report.page import page
from fedda.contrib.report.page.noted import Noted
from tests.command_lines import call
from tests.contrib.report.test_page import Read, results

D, SIZES = 24, (10, 6)
SMALL = SumSettings("dils", p=2, min_examples=16, network=DiscriminatorConfig(sizes="10,6"))
HALF = HALVES["adda", "target"]


def random_features(n: int = 64, seed: int = 0) -> Tensor:
    """Draw features like those behind a ReLU."""
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)).relu()


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


def test_a_window_of_a_fixed_discriminator_equals_one_large_batch() -> None:
    z = random_features(12)
    parts = window_gradient(Discriminator(D, SIZES), HALF, z.split(3))
    whole = window_gradient(Discriminator(D, SIZES), HALF, [z])
    assert torch.allclose(parts, 4 * whole, rtol=1e-4, atol=1e-6)


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


@pytest.mark.nightly("fedda/contrib/audit")
def test_clipping_does_not_stop_the_attack_and_noise_does() -> None:
    bare = replace(SMALL, min_examples=1)
    for settings in (bare, replace(bare, clip=1e-3)):
        found = audit(random_features(), settings, trials=2)
        assert by_size(found, "sent")[1]["features"] == 1
    noisy = audit(random_features(), replace(bare, noise=0.1), trials=2)
    assert by_size(noisy, "bare")[1]["features"] == 1
    assert by_size(noisy, "sent")[1]["features"] == 0
    assert by_size(noisy, "sent")[1]["cosine"] < 0.9


def test_every_method_with_a_discriminator_is_known() -> None:
    for method in plugins.methods():
        has_one = "discriminator" in plugins.method(method).config.model_fields
        assert (method in attackable()) == has_one
    for method in ("fdann", "fwdgrl"):
        found = SumSettings.of({"method": method})
        assert importlib.import_module(f"clients.{method}").Member.loss == found.loss


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
    about: Any = {"config": config, "inputs": Inputs((12,)), "classes": names}
    models.save(run / "model.safetensors", model, **about)
    (run / "results.json").write_text(json.dumps(results()))
    (run / "config.json").write_text(json.dumps({"method": "dils", "rounds": 2, "exchange.p": 2}))
    return run


def run(*words: object, code: int = 0) -> Any:
    return call("audit", "gradients", *words, code=code)


@pytest.mark.nightly("fedda/contrib/audit")
def test_the_command_and_the_report(finished: Path) -> None:
    data = finished.parent / "clinic.npz"
    words = [finished, "--data", data, "--trials", 1, "--min-examples", 8, "--sizes", "6"]
    said = run(*words).stdout.replace("\n", " ")
    assert "fewer than 8 examples is not sent" in said
    found = json.loads((finished / "findings.json").read_text())["gradients"]
    about = {"method": "dils", "p": 2, "min-examples": 8, "clip": 10.0, "noise": 0.0}
    assert found.items() >= (about | {"loss": "adda"}).items()
    assert (found["penalty"], found["network"]["sizes"], found["what-if"]) == (0, "6", True)
    assert (found["data"], found["features"], found["width"]) == ("clinic.npz", 40, 8)
    assert [row["examples"] for row in found["findings"]] == [1, 2, 4, 8, 16, 32]
    if_sent = [row["examples"] for row in found["findings"] if "what-if" in row["recovered"]]
    assert if_sent == [8, 16, 32]
    call("report", finished)
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


def test_a_run_without_a_discriminator_is_refused(finished: Path) -> None:
    alone = finished.parent / "alone.safetensors"
    shutil.copy(finished / "model.safetensors", alone)
    (finished / "config.json").write_text(json.dumps({"method": "fdan"}))
    words = ["--data", finished.parent / "clinic.npz", "--sizes", "6", "--trials", 1]
    for what, text in (
        (finished, "A run of fdan has no"),
        (alone, "There is no config.json that says"),
    ):
        said = run(what, *words, code=1).stderr
        assert said.startswith(f"error: {text}")
        known = "dils, fada, fdann, fruda, fwdgrl, mdan"
        assert f"{known} have one: give one of them as --method" in said
        assert not (what.parent / "findings.json").exists()
    run(alone, *words, "--method", "dils")
    found = json.loads((alone.parent / "findings.json").read_text())
    assert found["gradients"]["what-if"] is True


def test_labels_are_neither_needed_nor_read(finished: Path) -> None:
    data = finished.parent / "clinic.npz"
    with np.load(data) as file:
        np.savez(data, x=file["x"], y=np.array(["not", "a", "label"]))
    run(finished, "--data", data, "--trials", 1)


def test_names_in_an_audit_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    found = audit(random_features(4), replace(SMALL, method=evil), trials=1, what_if=True)
    written = {"gradients": found.to_json() | {"data": evil}}
    (tmp_path / "findings.json").write_text(json.dumps(written))
    html = page(results(), Noted(), collect(tmp_path))
    assert "A run of &lt;script&gt;" in html and evil not in html


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
        said = run(*words, code=1).stderr
        assert said.startswith("error: ") and text in said
    assert not (finished / "findings.json").exists()
