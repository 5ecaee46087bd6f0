"""DILS over two sites against one loop that has both sides' data (FRUDA, algorithm 1)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F

from clients.site.memory import resident
from fedda import models
from fedda.adversarial.discriminators import Discriminator
from fedda.data import Labelled, load_evaluation, load_source, load_target
from fedda.errors import Code, ConfigError
from fedda.halves import load_half
from fedda.settings import RunConfig
from fedda.train import generator, seed_for
from server.journal import Journal
from server.simulation import simulate
from tests.local_grid import CLASSES, PLAIN, make_domains, stop_after
from tests.reference import windows
from tests.reference.adversarial import shorten
from tests.reference.lazy import mapping, whole_loss

STEPS, SIDE = 3, 16  # steps per round: 40 and 48 images in batches of 16
DI_LR, LR, HEAD_LR, GAMMA = 0.01, 0.003, 0.001, 10.0
BETAS, DI_BETAS = (0.6, 0.99), (0.4, 0.995)
DILS: dict[str, Any] = {
    **PLAIN,
    "method": "dils",
    "rounds": 2,
    "run.name": "pair",
    "model.name": "lenet",  # no BatchNorm: before it, a bias has no gradient
    "input.size": SIDE,
    "train.batch-size": 16,
    "dils.pretrain": 0,
    "dils.epochs": 1,
    "dils.lr": LR,
    "dils.beta1": BETAS[0],
    "dils.beta2": BETAS[1],
    "dils.head-lr": HEAD_LR,
    "dils.penalty": GAMMA,
    "dils.spectral": False,
    "dils.critic-steps": 0,
    "dils.discriminator.lr": DI_LR,
    "dils.discriminator.beta1": DI_BETAS[0],
    "dils.discriminator.beta2": DI_BETAS[1],
    "dils.discriminator.sizes": "8",
    "exchange.min-examples": 1,
    "exchange.expose-features": True,
    "exchange.clip": 1e9,
    "track.tensorboard": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("domains")
    nodes = {str(node["name"]): node for node in make_domains(root)}
    return [nodes["anna"], nodes["town"]]


def run(
    pair: list[dict[str, Any]], folder: Path, listener: Any = None, **settings: Any
) -> dict[str, Any]:
    flat = DILS | {"run.dir": str(folder)} | settings
    journal = Journal(None, *([listener] if listener else []))
    return simulate(
        RunConfig.parse(flat), [node | {"threads": 1} for node in pair], journal, "process"
    )


def state_of(folder: Path, site: str, server_round: int) -> dict[str, Tensor]:
    place = folder / "pair" / "sites" / site
    return load_file(place / f"pair.dils-0.{server_round}.method.safetensors")


def batches(node: dict[str, Any], count: int, p: int) -> list[tuple[Tensor, Tensor | None]]:
    """Return the batches of a site's first steps."""
    data = (load_source if node["role"] == "source" else load_target)(node["data"], size=SIDE)
    x, y = data.x.float() / 255, data.y if isinstance(data, Labelled) else None
    blocks = windows.blocks(len(x), node["name"], 2)
    parts = windows.batches(blocks, 16, p, seed_for(0, node["name"]), count)
    return [(x[part], None if y is None else y[part]) for part in parts]


def penalty(DI: nn.Module, z: Tensor, draws: torch.Generator) -> Tensor:
    """Compute eq. 15's L_grad between samples of one side, sample by sample."""
    partner = torch.randperm(len(z), generator=draws)
    share = torch.rand(len(z), 1, generator=draws)
    total = torch.zeros(())
    for i in range(len(z)):
        u = (share[i] * z[i] + (1 - share[i]) * z[partner[i]]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(DI(u[None])[0], u, create_graph=True)
        total = total + (slope.norm() - 1) ** 2
    return total / len(z)


def centralised(
    loss: str,
    nodes: list[dict[str, Any]],
    p: int,
    rounds: int,
    overlap: bool = False,
    critic_steps: int = 0,
    rate: float = DI_LR,
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Run algorithm 1 in one loop -> the collaborator's model, the target's, the discriminator."""
    config = RunConfig.parse(DILS)
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0)
    S, T = copy.deepcopy(start), copy.deepcopy(start)
    S.train(loss == "cada")
    T.train()
    DI = Discriminator(500, (8,), seed=0)
    moves_DI: optim.Optimizer = optim.Adam(DI.parameters(), lr=DI_LR, betas=DI_BETAS)
    many = max(1, critic_steps * p)  # steps of a critic per step of the encoder
    if loss == "wassda":
        moves_DI = optim.SGD(DI.parameters(), lr=rate, momentum=0.9)
    moves_T = optim.Adam(T.encoder.parameters(), lr=LR, betas=BETAS)
    head = {"params": S.head.parameters(), "lr": HEAD_LR}
    moves_S = optim.Adam([{"params": S.encoder.parameters()}, head], lr=LR, betas=BETAS)
    history: list[Tensor] = []
    both = [batches(node, rounds * STEPS * many, p) for node in nodes]
    draws: dict[str, torch.Generator] = {}

    def move_encoders(z_S: Tensor, z_T: Tensor, y_S: Tensor | None) -> None:
        objective = mapping(loss, DI(z_S), DI(z_T))
        if loss == "cada":
            assert y_S is not None
            objective = objective + F.cross_entropy(S.head(z_S.detach()), y_S)
        moves_T.zero_grad()
        moves_S.zero_grad()
        objective.backward()
        moves_T.step()
        if loss == "cada":
            moves_S.step()

    for n, ((x_S, y_S), (x_T, _)) in enumerate(zip(*both, strict=True)):
        if n % STEPS == 0 and not critic_steps:
            names = (node["name"] for node in nodes)
            draws = {name: generator(0, name, n // STEPS + 1, "penalty") for name in names}
        z_S, z_T = S.features(x_S), T.features(x_T)
        total = whole_loss(loss, DI(z_S), DI(z_T))
        if loss == "wassda" and not critic_steps:
            for z, own in zip((z_S, z_T), draws.values(), strict=True):
                total = total + GAMMA / 2 * penalty(DI, z, own)
        g = torch.autograd.grad(total, list(DI.parameters()), retain_graph=True)
        history.append(torch.cat([part.flatten() for part in g]))
        if not critic_steps:
            move_encoders(z_S, z_T, y_S)
        last = (n + 1) // p * p - (p if overlap else 0)
        if last >= p:
            g_sync = torch.stack(history[last - p : last]).sum(dim=0) / (2 * p)
            sizes = [w.numel() for w in DI.parameters()]
            for w, part in zip(DI.parameters(), g_sync.split(sizes), strict=True):
                w.grad = part.view_as(w).clone()
            moves_DI.step()
            if critic_steps:
                shorten(DI)
        if critic_steps and (n + 1) % many == 0:  # the critic is ahead
            move_encoders(z_S, z_T, y_S)
    return S, T, DI


@pytest.mark.parametrize(
    ("loss", "p", "overlap"),
    [(loss, 1, False) for loss in ("adda", "grl", "wassda", "cada")]
    + [("adda", 2, False), ("cada", 3, False), ("adda", 2, True)],
)
def test_two_sites_compute_the_same_as_one_loop_with_all_data(
    pair: list[dict[str, Any]], tmp_path: Path, loss: str, p: int, overlap: bool
) -> None:
    settings = {"dils.loss": loss, "exchange.p": p, "exchange.overlap": overlap}
    if loss == "wassda":
        # The gradient of a critic's bias can be 0 up to rounding, and Adam magnifies that.
        settings["dils.discriminator.optimizer"] = "sgd"
    run(pair, tmp_path, **settings)
    S, T, DI = centralised(loss, pair, p, rounds=2, overlap=overlap)
    for site, wanted in (("anna", S), ("town", T)):
        found = state_of(tmp_path, site, 2)
        for name, value in DI.state_dict().items():
            mine = found[f"discriminator/discriminator/{name}"]
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=2e-5)
        for name, value in wanted.state_dict().items():
            if site == "town" and name.startswith("head."):
                value = S.state_dict()[name]  # with CADA the target takes it over
            torch.testing.assert_close(found[f"model/module/{name}"], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(T.state_dict()["encoder.0.weight"], S.state_dict()["encoder.0.weight"])


def test_a_bounded_critic_makes_fresh_sums_before_each_step_of_the_encoder(
    pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Two sums of p = 2 batches each, so four steps of the critic, before each of three steps."""
    settings = {"dils.loss": "wassda", "dils.critic-steps": 2, "dils.spectral": True}
    settings |= {"exchange.p": 2, "dils.penalty": 0.0, "dils.discriminator.optimizer": "sgd"}
    settings |= {"dils.discriminator.lr": 1.0}  # so that the critic meets its bound
    rounds = run(pair, tmp_path, **settings)["trainings"]["dils"][0]["rounds"]
    _, T, DI = centralised("wassda", pair, 2, rounds=2, critic_steps=2, rate=1.0)
    found = state_of(tmp_path, "town", 2)
    for name, value in DI.state_dict().items():
        mine = found[f"discriminator/discriminator/{name}"]
        torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-5)
    longest = [float(torch.linalg.svdvals(w.detach())[0]) for w in DI.parameters() if w.dim() == 2]
    assert max(longest) == pytest.approx(1.0, rel=1e-4)
    for name, value in T.get_submodule("encoder").state_dict().items():
        mine = found[f"model/module/encoder.{name}"]
        torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-5)
    size = sum(w.numel() for w in DI.parameters()) * 4
    assert 6 * size < rounds[0]["bytes"]["from target gradient"] < 6 * (size + 64) + 200


def test_with_cada_the_last_classifier_reaches_the_target_before_its_test(
    pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    results = run(pair, tmp_path, **{"dils.loss": "cada", "exchange.p": 1, "rounds": 2})
    found = {site: state_of(tmp_path, site, 2) for site in ("anna", "town")}
    saved = load_file(tmp_path / "pair" / "sites" / "town" / "pair.dils-0.model.safetensors")
    for name in ("weight", "bias"):
        theirs = found["anna"][f"model/module/head.{name}"]
        assert torch.equal(found["town"][f"model/module/head.{name}"], theirs)
        assert torch.equal(saved[f"head.{name}"], theirs)
    network = models.build(RunConfig.parse(DILS).model, (1, SIDE, SIDE), CLASSES, seed=0)
    network.load_state_dict(saved)
    tests = load_evaluation(pair[1]["data"], size=SIDE)
    assert tests is not None
    p = models.predict(network, tests.x)
    accuracy = float((p.argmax(dim=1) == tests.y).double().mean())
    entry = results["trainings"]["dils"][0]["rounds"][-1]
    assert entry["accuracy"] == pytest.approx(accuracy, abs=0.01)


def test_after_the_pretraining_only_gradients_cross(
    pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"rounds": 4, "dils.pretrain": 1, "exchange.p": 2}
    found = run(pair, tmp_path, **settings)["trainings"]["dils"][0]["rounds"]
    moved = [{k for k in entry["bytes"] if "scalars" not in k} for entry in found]
    gradients = {
        f"{way} {role} gradient" for way in ("to", "from") for role in ("source", "target")
    }
    test = {"to target model"}  # the target tests the pretraining's model
    assert moved[0] == {"to source model", "from source model"} | test
    assert moved[1] == gradients | {"to source model"}  # the target has kept the one it tested
    assert moved[2] == moved[3] == gradients
    size = sum(w.numel() for w in Discriminator(500, (8,)).parameters()) * 4
    # The three rounds exchange after step 2, after steps 4 and 6, and after step 8.
    for entry, syncs in zip(found[1:], (1, 2, 1), strict=True):
        for way in gradients:
            assert syncs * size < entry["bytes"][way] < syncs * (size + 64) + 200
    assert {round(sum(entry["weights"].values()), 9) for entry in found} == {1.0}


def test_an_adapting_round_can_have_the_steps_of_several_epochs(
    pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"rounds": 2, "dils.pretrain": 1, "dils.epochs": 4, "exchange.p": 2}
    _, adapting = run(pair, tmp_path, **settings)["trainings"]["dils"][0]["rounds"]
    size = sum(w.numel() for w in Discriminator(500, (8,)).parameters()) * 4
    syncs = 4 * STEPS // 2
    assert syncs * size < adapting["bytes"]["from target gradient"] < syncs * (size + 64) + 200


@pytest.mark.parametrize("share", [False, True])
def test_the_targets_model_stays_at_the_target_unless_share_is_set(
    pair: list[dict[str, Any]], tmp_path: Path, share: bool
) -> None:
    assert not RunConfig.parse({}).options["dils"].share  # by default
    results = run(pair, tmp_path, **{"dils.share": share, "exchange.p": 1})
    own = load_file(tmp_path / "pair" / "sites" / "town" / "pair.dils-0.model.safetensors")
    server = load_file(results["trainings"]["dils"][0]["model"])
    same = all(torch.equal(own[name], server[name]) for name in own)
    assert same == share
    sent = {k for entry in results["trainings"]["dils"][0]["rounds"] for k in entry["bytes"]}
    assert ("from target model" in sent) == share


@pytest.mark.slow
def test_a_resumed_run_sends_in_the_same_precision_as_before(
    pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"rounds": 3, "exchange.p": 1, "dils.loss": "cada", "wire.dtype": "float16"}
    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path, stop_after(2), **settings)
    results = run(pair, tmp_path, **settings, **{"run.resume": True})
    found = [e["bytes"]["to target model"] for e in results["trainings"]["dils"][0]["rounds"]]
    assert found[1] == found[2]


def test_a_site_that_lost_its_state_reports_it(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    def lose(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "round" and event["round"] == 1:
            for path in (tmp_path / "pair" / "sites" / "town").glob("*.method.safetensors"):
                path.unlink()
            resident.cache_clear()

    with pytest.raises(Exception, match="gave no usable reply"):
        run(pair, tmp_path, lose, **{"wait.tries": 1, "exchange.p": 1})
    troubles = {(e["what"], e["site"]): e["text"] for e in events if e["event"] == "trouble"}
    assert troubles["failed", "town"] == Code.LOST.public
    assert troubles["failed", "anna"] == Code.EXCHANGE.public
    assert "town" in troubles["exchange ended", ""]


def test_rounds_of_other_lengths_are_refused(
    pair: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the windows of images would no longer match the windows of the sums."""
    strategy: Any = load_half("strategies", "dils").DILS
    monkeypatch.setattr(strategy, "steps_per_round", lambda self, _: 2 + self.round)
    events: list[dict[str, Any]] = []
    with pytest.raises(Exception, match="gave no usable reply"):
        run(pair, tmp_path, events.append, **{"wait.tries": 1, "exchange.p": 1})
    failed = [(e["round"], e["site"], e["text"]) for e in events if e.get("what") == "failed"]
    assert sorted(failed) == [
        (2, "anna", Code.WIRE.public),
        (2, "town", Code.EXCHANGE.public),  # the exchange reports that anna has left
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exchange.expose-features": False}, "exchange.min-examples is 1, but .* features"),
        (
            {"exchange.min-examples": 256, "exchange.p": 4},
            "exchange.p is 4 and train.batch-size 16, so a gradient is over 64 .* 16 or .* to 64",
        ),
    ],
)
def test_a_gradient_over_few_examples_is_refused_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse(DILS | settings)
