"""Attacks on models, atoms and shares: their formulas, what they recover, and how it is shown."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from fedda import data, models
from fedda.algorithms import kd3a
from fedda.config import ModelConfig, PrivacyConfig
from fedda.config.inputs import Inputs
from fedda.contrib.audit import membership, properties, shares, update
from fedda.contrib.audit.finding import Audit, collect, parse
from fedda.contrib.audit.subject import Subject, subject
from fedda.contrib.report.page import page
from fedda.contrib.report.page.noted import Noted
from fedda.errors import ConfigError, DataError
from fedda.train import generator
from tests.command_lines import call
from tests.contrib.report.test_page import Read, results

NAMES = ("0", "1", "2")


def made(tmp_path: Path, N: int = 48, side: int = 0, name: str = "mlp") -> Path:
    """A run's folder with a model of three classes, and data beside it."""
    rng = np.random.default_rng(0)
    y = np.arange(N) % 3
    x: np.ndarray = rng.random((N, 12), np.float32) + y[:, None]
    if side:
        x = (rng.random((N, side, side, 1)) * 255).astype(np.uint8)
    np.savez(tmp_path / "clinic.npz", x_train=x, y_train=y, x_test=x[::-1] // 2, y_test=y[::-1])
    run = tmp_path / "run"
    run.mkdir()
    config = ModelConfig(name=name, hidden="8" if name == "mlp" else "")
    shape = (1, side, side) if side else (12,)
    model = models.build(config, shape, 3, seed=0)
    about: Any = {"config": config, "inputs": Inputs(shape), "classes": NAMES}
    models.save(run / "model.safetensors", model, **about)
    (run / "results.json").write_text(json.dumps(results()))
    settings = {"method": "fedavg", "rounds": 2, "train.batch-size": 8, "train.lr": 0.05}
    (run / "config.json").write_text(json.dumps(settings))
    return run


def site(run: Path, **changes: Any) -> Subject:
    found = subject(
        run / "model.safetensors",
        json.loads((run / "config.json").read_text()),
        run.parent / "clinic.npz",
        data.Reading(),
        torch.device("cpu"),
    )
    return replace(found, **changes)


def test_the_subject_is_the_run_and_the_sites_data(tmp_path: Path) -> None:
    s = site(made(tmp_path))
    assert (s.train.batch_size, s.train.lr, s.rounds, s.classes) == (8, 0.05, 2, 3)
    assert s.x.shape == (48, 12) and s.held is not None and s.held[0].shape == (48, 12)
    assert not s.are_images
    with pytest.raises(ConfigError, match="layers of shot"):
        replace(s, about=replace(s.about, extension=models.Extension("shot", {}))).fresh(0)


def test_one_image_is_recovered_and_many_are_not(tmp_path: Path) -> None:
    s = site(made(tmp_path, 40, side=4))
    done: list[float] = []
    found, pictures = update.invert(s, iterations=60, note=done.append)
    assert done == sorted({*done}) and done[-1] == 1 and len(done) == len(found.findings)
    assert [f.on for f in found.findings] == 5 * ["early"] + 5 * ["last"]
    by_size = {f.examples: f for f in found.findings if f.on == "last"}
    assert list(by_size) == [1, 2, 4, 8, 16]
    one, many = by_size[1], by_size[16]
    assert one.recovered["images"] == 1 and one.recovered["psnr"] > one.guess["psnr"] + 5
    assert many.recovered["images"] < 0.2
    assert found.settings["threshold"] >= 15 and len(pictures) == 10


def test_psnr_by_hand() -> None:
    a = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    b = torch.tensor([[0.1, 0.1]])
    assert update.psnr(a, b, 1.0).flatten().tolist() == pytest.approx(
        [20.0, -10 * math.log10(0.81)]
    )
    assert float(update.psnr(10 * a, 10 * b, 10.0)[0, 0]) == pytest.approx(20.0)


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert float(update.variation(x)) == pytest.approx((0 + 2) / 2 + (1 + 3) / 2)
    assert float(update.variation(torch.rand(3, 5))) == 0


def test_confidence_by_hand() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model: Any = Fixed()
    p = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3]])
    phi = membership.confidences(model, p.log(), torch.tensor([0, 2]))
    assert phi.tolist() == pytest.approx([math.log(4), math.log(3 / 7)], abs=1e-6)


@pytest.mark.parametrize("S", [6, 70])
def test_scores_match_a_naive_loop(S: int) -> None:
    """With few shadow models one variance for all examples, with many one for each."""
    N = 5
    phi = torch.randn(S, N, generator=generator(0)).double()
    inside = membership.halves(S, N, generator(1))
    found = membership.scores(phi, inside)

    def normal(x: float, mean: float, var: float) -> float:
        return -((x - mean) ** 2) / (2 * var) - math.log(2 * math.pi * var) / 2

    for s in range(S):
        stats: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for i in range(N):
            for member in (True, False):
                of = [float(phi[t, i]) for t in range(S) if t != s and bool(inside[t, i]) == member]
                stats[member].append((float(np.mean(of)), float(np.var(of))))
        for i in range(N):
            terms = []
            for member in (True, False):
                mean, var = stats[member][i]
                if S < membership.FEW:
                    var = float(np.mean([v for _, v in stats[member]]))
                terms.append(normal(float(phi[s, i]), mean, var + membership.SPARE))
            assert float(found[s, i]) == pytest.approx(terms[0] - terms[1], rel=1e-5, abs=1e-6)


def test_auc_is_sklearns_and_the_rates_are_by_hand() -> None:
    score = torch.randn(200, generator=generator(0)).round(decimals=1)
    inside = torch.rand(200, generator=generator(1)) < 0.4
    assert membership.told(score, inside)["auc"] == pytest.approx(roc_auc_score(inside, score))
    score = torch.tensor([9.0, 5.0, 2.0, *range(8), 8.0, 8.0])  # three members, ten others
    found = membership.told(score, torch.arange(13) < 3, (0.0, 0.2, 1.0))
    del found["auc"]
    assert found == {"tpr@0": 1 / 3, "tpr@0.2": pytest.approx(1 / 3), "tpr@1": 1.0}
    with pytest.raises(DataError, match="some examples are members"):
        membership.told(score, torch.ones(13, dtype=torch.bool))


@pytest.mark.nightly("fedda/contrib/audit")
def test_what_was_learnt_by_heart_is_found_and_labels_alone_are_not(tmp_path: Path) -> None:
    s = site(made(tmp_path))
    hard = replace(s, y=torch.randint(0, 3, (48,), generator=generator(0)))  # nothing to learn
    phi, inside = membership.shadows(hard, 8, 60, seed=0)
    assert membership.told(membership.scores(phi, inside), inside)["auc"] > 0.7
    phi, inside = membership.shadows(hard, 8, 0, seed=0)  # nothing was learnt
    assert 0.3 < membership.told(membership.scores(phi, inside), inside)["auc"] < 0.7


@pytest.mark.nightly("fedda/contrib/audit")
def test_noise_hides_members(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    s = site(made(tmp_path), privacy=PrivacyConfig(noise=4.0))
    hard = replace(s, y=torch.randint(0, 3, (48,), generator=generator(0)))
    phi, inside = membership.shadows(hard, 8, 60, seed=0)
    assert membership.told(membership.scores(phi, inside), inside)["auc"] < 0.65


def test_atoms_at_training_features_give_them_away() -> None:
    z, held = torch.randn(20, 3, generator=generator(0)), torch.randn(30, 3, generator=generator(1))
    assert membership.near(z, held, z)["auc"] == 1
    both = membership.near(z, held, torch.zeros(1, 3))
    distance = -torch.cat([z, held]).norm(dim=1)
    assert both["auc"] == pytest.approx(roc_auc_score(np.arange(50) < 20, distance))


def test_one_step_tells_the_shares_by_the_formula(tmp_path: Path) -> None:
    """The change of the head's bias is the rate times (share - mean prediction)."""
    s = site(made(tmp_path))
    chosen = torch.arange(30)
    u = shares.change(s, s.model, chosen, torch.arange(30, 48), 30)
    model = s.model.train()
    p = F.softmax(model(s.x[:30]), dim=1).mean(dim=0)
    true = s.y[:30].bincount(minlength=3) / 30
    torch.testing.assert_close(u[:3], s.train.lr * (true - p).detach(), atol=1e-6, rtol=1e-4)


def test_one_step_leaks_and_the_mean_over_sites_does_less(tmp_path: Path) -> None:
    found = errors(shares.leaked(site(made(tmp_path, 240)), sites=9))
    assert found["step"] < 0.1 < found["guess"]
    assert found["step"] <= found["last"] <= found["mean"] + 0.05
    few = replace(site(tmp_path / "run"), x=torch.rand(12, 12), y=torch.arange(12) % 3)
    with pytest.raises(DataError, match="needs two classes and 24 examples"):
        shares.leaked(few)


def errors(found: Audit) -> dict[str, float]:
    """The errors of shares, by what they are from; by guesses, too."""
    assert len({f.guess["error"] for f in found.findings}) == 1
    return {f.on: f.recovered["error"] for f in found.findings} | {
        "guess": found.findings[0].guess["error"]
    }


def test_the_votes_numbers_are_what_kd3a_sends() -> None:
    p = torch.softmax(4 * torch.randn(20, 3, 4, generator=generator(0)), dim=2)
    options = kd3a.Config(gate=kd3a.ConfidenceGate(low=0.5, high=0.6), focus="marginal")
    u = kd3a.numbers_of_vote(options, p)
    sure = p.amax(dim=2) > 0.6
    Q = [kd3a.quality(kd3a.knowledge_vote(p[:, own], 0.6)) for own in ([0, 1, 2], [1, 2])]
    assert float(u[0]) == pytest.approx(float(Q[0] - Q[1]) / 20, rel=1e-6)
    assert u.shape == (4,) and float(u[3]) == pytest.approx(float(sure.any(dim=1).float().mean()))


def test_the_vote_tells_something_where_sources_know_other_classes(tmp_path: Path) -> None:
    s = site(made(tmp_path, 360))
    options = kd3a.Config(gate=kd3a.ConfidenceGate(low=0.4, high=0.5))
    found = errors(properties.leaked(s, method=kd3a.METHOD, options=options, epochs=3, sites=30))
    assert found["vote"] < found["guess"]


@pytest.mark.nightly("fedda/contrib/audit")
def test_all_attacks_and_the_report(tmp_path: Path) -> None:
    run = made(tmp_path, 80, side=8, name="digit-cnn")  # 10 updates, 2 + 4 + 2 rows of the others
    words = ["--data", tmp_path / "clinic.npz", "--steps", 5, "--shadows", 4, "--sites", 3]
    call("audit", "all", run, *words, "--epochs", 1)
    found = json.loads((run / "findings.json").read_text())
    assert set(found) == {"update", "membership", "shares", "properties"}
    assert {(about["data"], about["seed"]) for about in found.values()} == {("clinic.npz", 0)}
    told = found["properties"]["findings"]
    assert [row["on"] for row in told] == ["moments", "moments_mean"]
    assert told[0]["recovered"]["error"] > 0 and "secure sums" in told[0]["closed_by"]
    with Image.open(run / "recovered.png") as picture:
        assert picture.size == (10 * 104 + 8, 216)  # both models, over 1 to 16 examples
    call("report", run)
    html = (run / "report.html").read_text()
    table = Read(html).tables["Audit"]
    assert len(table) == 1 + 10 + 2 + 4 + 2
    assert "<img" not in html
    again = call("audit", "membership", run, *words[:2], "--shadows", 4, "--epochs", 1, "--json")
    assert json.loads(again.stdout)["membership"] == found["membership"]
    assert set(json.loads((run / "findings.json").read_text())) == set(found)


def test_what_cannot_be_attacked_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path)
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 13), np.float32), y=np.arange(9) % 3)
    np.savez(tmp_path / "few.npz", x=np.zeros((3, 12), np.float32), y=np.arange(3))
    for words, says in (
        ((tmp_path, "--data", tmp_path / "clinic.npz"), "holds no model.safetensors"),
        ((run, "--data", tmp_path / "wide.npz"), "examples of 13 and the model takes 12"),
        ((run, "--data", tmp_path / "few.npz"), "needs 4 or more"),
        ((run, "--data", tmp_path / "gone"), "does not exist"),
    ):
        assert says in call("audit", "shares", *words, code=1).stderr
    assert not (run / "findings.json").exists()


FOUND: dict[str, Any] = {
    "update": {
        "data": "<b>clinic</b>",
        "threshold": 19.2,
        "findings": [
            {"on": "early", "examples": 64}
            | {"recovered": {"images": 0.0, "psnr": 10.5}, "guess": {"images": 0.01, "psnr": 13.2}}
        ],
    },
    "membership": {
        "data": "<b>clinic</b>",
        "shadows": 8,
        "epochs": 5,
        "noise": 1.0,
        "findings": [
            {"on": on, "examples": 600, "guess": membership.GUESS}
            | {"recovered": {"auc": auc, "tpr@0.001": 0, "tpr@0.01": found}}
            for on, auc, found in (("model", 0.6, 0.05), ("confidence", 0.5, 0.01))
        ],
    },
}


def test_the_page_shows_numbers_and_escapes_names(tmp_path: Path) -> None:
    (tmp_path / "findings.json").write_text(json.dumps(FOUND))
    html = page(results(), Noted(), collect(tmp_path))
    assert "<b>clinic" not in html and "&lt;b&gt;clinic" in html
    words = Read(html).words
    assert "AUC 0.600; 5.0 % at 1 % false" in words and "with privacy.noise=1" in words
    (row, *_) = parse(FOUND)[0].findings
    assert row.cells() == (
        "images from a step of an early model over 64",
        "0.0 % of the images; 10.5 dB",
        "1.0 % of the images; 13.2 dB",
        "more images in a block (--min-images), privacy.noise, secure sums",
    )
    assert "secure sums" not in replace(row, examples=8).closed_by


def test_no_text_of_a_file_reaches_the_page_but_names(tmp_path: Path) -> None:
    """Words come from fedda, whatever the file says."""
    evil = "call this number"
    forged = json.loads(json.dumps(FOUND))
    forged["update"]["why"] = forged["update"]["findings"][0]["closed_by"] = evil
    forged["update"]["findings"][0]["recovered"][evil] = 1.0
    (tmp_path / "findings.json").write_text(json.dumps(forged))
    html = page(results(), Noted(), collect(tmp_path))
    assert evil not in html and "more images in a block" in html


EVIL, ROW = "<evil>", FOUND["membership"]["findings"][0]
ODD: list[dict[str, Any]] = [{"on": EVIL}, {"examples": 0}]
ODD += [{"recovered": {"auc": 0.5}}, {"guess": {"auc": EVIL}}]


@pytest.mark.parametrize("name", ["audit.json", "attacks.json"])
def test_a_file_of_an_earlier_version_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    words = Read(page(results(), Noted(), collect(tmp_path))).words
    assert f"{name} is of an earlier version; run `fedda audit` again" in words


@pytest.mark.parametrize(
    "change",
    [
        {"update": {}},
        {"update": None},
        {"update": FOUND["update"] | {"findings": []}},
        {"update": FOUND["update"] | {"threshold": EVIL}},
        *({"membership": FOUND["membership"] | {"findings": [ROW | odd]}} for odd in ODD),
        {"membership": {k: v for k, v in FOUND["membership"].items() if k != "shadows"}},
        {EVIL: FOUND["update"]},
        None,
    ],
)
def test_a_file_in_another_format_is_left_out(tmp_path: Path, change: Any) -> None:
    (tmp_path / "findings.json").write_text(json.dumps(FOUND | change if change else []))
    found = collect(tmp_path)
    assert not found.audits
    html = page(results(), Noted(), found)
    assert "Left out: " in html and "findings.json cannot be read" in html
    assert EVIL not in html
