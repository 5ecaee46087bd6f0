"""Differential privacy of a source's examples: DP-SGD, its accountant, and the site's budget."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clients import fedavg, fedprox
from clients.policy.rules import Budget, Policy, Privacy
from clients.policy.spent import Spent
from clients.site import blocks, noised
from clients.site.memory import resident
from fedda import models, records
from fedda.config import ModelConfig
from fedda.errors import BudgetError, Code, ConfigError, QuorumError
from fedda.models import Model, batchnorms
from fedda.ops import keys
from fedda.secure.accountant import epsilon
from fedda.settings import RunConfig, Task
from tests.federation import Federation, rounds
from tests.local_grid import EXAMPLES, SOURCES, Bench, Node, sent_by

pytestmark = pytest.mark.usefixtures("fresh_sites")
pytest.importorskip("opacus")

PRIVATE = {"privacy__noise": 1.0, "model__norm": "group"}


# ---- the accountant ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [[(1.0, 0.1, 100)], [(0.7, 0.02, 1000)], [(2.0, 0.5, 40), (1.0, 0.05, 300)]]
)
def test_epsilon_is_that_of_another_accountant(steps: list[tuple[float, float, int]]) -> None:
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    other = rdp.RdpAccountant()
    for sigma, q, n in steps:
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
        other.compose(dp.SelfComposedDpEvent(event, n))
    assert epsilon(steps, 1e-5) == pytest.approx(other.get_epsilon(1e-5), rel=0.01)


def test_epsilon_by_hand() -> None:
    """With q = 1 it is the Gaussian mechanism's: RDP a n / (2 sigma^2), at the best order a."""
    sigma, n, delta = 4.0, 3, 1e-5
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    by_hand = min(
        a * n / (2 * sigma**2) + np.log((a - 1) / a) - (np.log(delta) + np.log(a)) / (a - 1)
        for a in orders
    )
    assert epsilon([(sigma, 1.0, n)], delta) == pytest.approx(by_hand, rel=1e-6)
    assert epsilon([], delta) == epsilon([(1.0, 0.1, 0)], delta) == 0.0


# ---- a step --------------------------------------------------------------------------------------


class Few:
    """As much of a source as a step of DP-SGD needs: a small network and its examples."""

    def __init__(self, model: Model, N: int, penalty: float = 0.0) -> None:
        draws = torch.Generator().manual_seed(1)
        self.x = torch.rand(N, 1, 8, 8, generator=draws)
        self.y = torch.randint(0, 4, (N,), generator=draws)
        self.model = model
        self.start = [p.detach().clone() for p in model.parameters()]
        self.mu = penalty

    def inputs(self, indices: torch.Tensor) -> torch.Tensor:
        return self.x[indices]

    def labels(self, indices: torch.Tensor) -> torch.Tensor:
        return self.y[indices]

    def penalty(self) -> torch.Tensor | float:
        if not self.mu:
            return 0.0
        pairs = zip(self.model.parameters(), self.start, strict=True)
        return self.mu / 2 * sum((((p - q + 1) ** 2).sum() for p, q in pairs), torch.zeros(()))


def network() -> Model:
    return models.build(ModelConfig(name="digit-cnn", norm="group"), (1, 8, 8), 4, 0)


def optimizer(few: Few, clip: float, expected: int) -> Any:
    from opacus.optimizers import DPOptimizer

    return DPOptimizer(
        torch.optim.SGD(few.model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=expected,
    )


def twin(few: Few, batch: list[int], clip: float, expected: int) -> list[torch.Tensor]:
    """Example by example: clip its gradient over all parameters, and add it up."""
    parameters = list(few.model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in batch:
        loss = F.cross_entropy(few.model(few.x[[i]]), few.y[[i]])
        gradient = torch.autograd.grad(loss, parameters)
        norm = float(torch.sqrt(sum((g**2).sum() for g in gradient)))  # type: ignore[arg-type]
        for t, g in zip(total, gradient, strict=True):
            t += g * min(1.0, clip / norm)
    return [t / expected for t in total]


@pytest.mark.parametrize("most", [2, 100])
@pytest.mark.parametrize("clip", [0.05, 1.0, 50.0])
def test_a_step_clips_each_examples_gradient(clip: float, most: int) -> None:
    few, batch = Few(network(), 12), [0, 3, 4, 7, 9]
    wanted = twin(few, batch, clip, 6)
    made: Any = few
    with noised.per_example(few.model):
        steps = optimizer(few, clip, 6)
        for _ in range(2):  # nothing is left over from the step before
            steps.zero_grad()
            noised._clipped_gradient(made, steps, torch.tensor(batch), most)
        found = [p.grad for p in few.model.parameters()]
    for a, b in zip(found, wanted, strict=True):
        assert a is not None and torch.allclose(a, b, atol=2e-6 * max(1.0, clip))
    assert not any(hasattr(p, "grad_sample") for p in few.model.parameters())  # nothing stays


def test_the_noise_has_its_size() -> None:
    few: Any = Few(network(), 4)
    with noised.per_example(few.model):
        steps = optimizer(few, 0.3, 8)
        steps.zero_grad()
        noised._clipped_gradient(few, steps, torch.tensor([], dtype=torch.long), 5)
        noised._add_noise(steps, 1.7 * 0.3, np.random.default_rng(3))
    noise = torch.cat([p.grad.flatten() for p in few.model.parameters()])
    assert len(noise) > 200_000
    assert float(noise.std()) == pytest.approx(1.7 * 0.3 / 8, rel=0.02)
    assert abs(float(noise.mean())) < 4 * float(noise.std()) / len(noise) ** 0.5


def test_what_is_secret_comes_from_no_seed_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generator on the CPU takes 32 bits of a seed, which can be searched."""

    class Seeded(torch.Generator):
        def manual_seed(self, seed: int) -> "torch.Generator":
            raise AssertionError("seeded")

    monkeypatch.setattr(torch, "Generator", Seeded)
    client: Any = SimpleNamespace(site=SimpleNamespace(reproducible=False), device="cpu")
    first, second = (float(g.random()) for g in noised._generators(client))
    assert first != second
    images = [bytes([i]) for i in range(60)]
    divided = [blocks.kept(tmp_path / str(i), images, 6, 12).blocks for i in range(2)]
    assert any(not torch.equal(a, b) for a, b in zip(*divided, strict=True))


def test_a_penalty_is_added_after_the_noise() -> None:
    """It depends on no example, so it is neither clipped nor counted."""
    few: Any = Few(network(), 8, penalty=2.0)
    with noised.per_example(few.model):
        steps = optimizer(few, 0.1, 4)
        noised._clipped_gradient(few, steps, torch.tensor([0, 1]), 9)
        before = [p.grad.clone() for p in few.model.parameters()]
        noised._penalty_gradient(few)
    for p, g in zip(few.model.parameters(), before, strict=True):
        assert torch.allclose(p.grad, g + 2.0)  # mu (w - w_t + 1) at w = w_t


def after(site: str, rounds: int) -> float:
    """Epsilon of a site after so many rounds of an epoch each."""
    N = EXAMPLES[site]
    return epsilon([(1.0, 16 / N, round(N / 16) * rounds)], 1e-5)


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["kd3a", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedavg", "fedprox"))]
)
def test_a_source_says_epsilon_and_not_its_loss(domains: list[Node], method: str) -> None:
    made = Bench(domains, method, rounds=2, **PRIVATE)
    epsilons = []
    for server_round in (1, 2):
        model, numbers = made.round(server_round)
        assert all(np.isfinite(a).all() for a in model.values())
        assert "loss" not in numbers
        epsilons.append(numbers["epsilon"])
    wanted = [max(after(site, t) for site in SOURCES) for t in (1, 2)]
    assert epsilons == pytest.approx(wanted) and epsilons[0] < epsilons[1]
    sent = [c for c in made.grid.crossed if c.way == "from" and c.role == "source"]
    assert all(c.numbers == {"epsilon", "steps", "seconds"} for c in sent if c.kind == "train")
    assert not any("running" in name for name in model)


@pytest.mark.slow
def test_it_goes_with_secure_sums_and_with_sealed_models(
    domains: list[Node], tmp_path: Path
) -> None:
    for node in domains:
        keys.add(tmp_path, node["name"], node["role"])
    made = {n["name"]: {"key": str(tmp_path / "nodes" / n["name"])} for n in domains}
    nodes = [n | made[n["name"]] | {"peers": str(tmp_path / "peers")} for n in domains]
    for method, plain, hidden in (
        ("fedavg", {}, {"secure": "sum"}),
        ("kd3a", {}, {"kd3a__relay": "sealed"}),
    ):
        found = []
        for settings in (plain, hidden):
            resident.cache_clear()
            found.append(Bench(nodes, method, **PRIVATE, **settings).round())
        (model, numbers), (other, same) = found
        assert numbers == pytest.approx(same)
        assert all(np.allclose(model[n], other[n], atol=1e-6) for n in model)


@pytest.mark.slow
def test_noise_of_a_real_site_has_a_seed_that_nobody_knows(domains: list[Node]) -> None:
    """The run's seed, which the server chooses, decides over nothing that is to be secret."""
    models_of: list[Any] = []
    for reproducible in (True, True, False, False):
        resident.cache_clear()
        nodes = [
            n | {"reproducible": reproducible, "state-dir": "", "min-images": 2} for n in domains
        ]
        made = Bench(nodes, "fedavg", **PRIVATE)
        site = SimpleNamespace(reproducible=reproducible)
        client: Any = SimpleNamespace(
            site=site, device="cpu", generator=lambda p: torch.Generator().manual_seed(5)
        )
        seeds = [float(g.random()) for g in noised._generators(client)]
        made.round()
        models_of.append((sent_by(made, "anna"), seeds))
    (a, one), (b, two), (_, three), (_, four) = models_of
    assert one == two and not {*three} & {*four} and three[0] != three[1]
    assert all(np.array_equal(a[n], b[n]) for n in a)


def annas_tests_taken(domains: list[Node], folder: Path) -> list[Node]:
    """The same sites, of which anna has no test images."""
    with np.load(domains[0]["data"]) as file:
        arrays = {n: file[n] for n in file if not n.endswith("test")}
    np.savez(folder / "anna.npz", **arrays)
    return [
        n | ({"data": str(folder / "anna.npz")} if n["name"] == "anna" else {}) for n in domains
    ]


def test_without_new_labelled_images_a_source_does_not_test(
    domains: list[Node], tmp_path: Path
) -> None:
    """A test on training images would say something about them without noise."""
    nodes = annas_tests_taken(domains, tmp_path)
    made = Bench(nodes, "fedavg", rounds=1, **PRIVATE)
    made.round()
    request = made.strategy.request(made.strategy.roster.sources[0], {"model": made.strategy.model})
    arrays, tables = records.read(request.content)
    tables["step"]["hop"] = "calibrate"
    request.content = records.write(arrays, **tables)
    request.metadata.message_type = "evaluate"
    reply = made.grid.call(request)
    assert reply.has_error() and reply.error.code == Code.POLICY


# ---- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(name="digit-cnn", norm="group"),
        ModelConfig(name="mlp", hidden="30,7", norm="group"),
        ModelConfig(name="resnet18", norm="group"),
        ModelConfig(name="mlp", hidden="30", bottleneck=9, norm="group"),
    ],
    ids=lambda c: c.name,
)
def test_group_norm_takes_the_place_of_batch_norm(config: ModelConfig) -> None:
    shape = (3, 32, 32)
    model = models.build(config, shape, 4, 0)
    plain = models.build(config.model_copy(update={"norm": "batch"}), shape, 4, 0)
    assert not batchnorms(model) and batchnorms(plain)
    groups = [m for m in model.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm)]
    assert len(groups) == len(batchnorms(plain))
    learnt = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, learnt.pop(name)), name
    assert not learnt
    model.eval()
    x = torch.rand(5, *shape)
    alone, together = model(x[:1]), model(x)[:1]
    assert torch.allclose(alone, together, atol=1e-5)
    model.train()(x[:1])  # a drawn batch may have one example


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model.norm": "batch"}, "model.norm is batch"),
        ({"method": "fdann"}, "sources of fdann send more"),
        ({"method": "adabn"}, "sources of adabn send more"),
        ({"method": "kd3a", "run.baseline": "adabn"}, "sources of adabn"),
        ({"train.sampler": "balanced"}, "train.sampler is balanced"),
        ({"train.accumulate": 2}, "train.accumulate is 2"),
        ({"train.precision": "bfloat16"}, "train.precision is bfloat16"),
        ({"privacy.clip": 0.0}, "clip"),
    ],
)
def test_what_would_not_be_private_is_refused(settings: dict[str, Any], says: str) -> None:
    flat = {"method": "fedavg", "privacy.noise": 1.0, "model.norm": "group"} | settings
    with pytest.raises(ConfigError, match=says):
        RunConfig.parse(flat)


def test_a_site_refuses_what_would_not_be_private() -> None:
    flat = RunConfig.parse({"method": "kd3a"}).task("kd3a", 0, (1, 8, 8), ["a", "b"], 4).flat()
    with pytest.raises(ConfigError, match="norm is batch"):
        Task.parse(flat | {"privacy.noise": 1.0})
    Task.parse(flat | {"privacy.noise": 1.0, "model.norm": "group"})


# ---- the site's policy and budget ----------------------------------------------------------------


def ruled(nodes: list[Node], text: str, folder: Path) -> list[Node]:
    path = folder / "policy.toml"
    path.write_text(text)
    rules = Policy.read(path).model_dump_json(by_alias=True)
    more = {"policy": rules, "audited": True}
    return [n | more | {"state-dir": str(folder / n["name"])} for n in nodes]


def failures(made: Bench) -> set[tuple[str, int]]:
    return {(c.site, c.error) for c in made.grid.crossed if c.error}


def test_a_site_can_ask_for_more_noise(domains: list[Node], tmp_path: Path) -> None:
    nodes = ruled(domains, "[privacy]\nnoise = 1.5", tmp_path)
    for settings in ({}, PRIVATE):
        resident.cache_clear()
        made = Bench(nodes, "fedavg", **settings)
        with pytest.raises(QuorumError):
            made.round()
        assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}
    resident.cache_clear()
    made = Bench(nodes, "kd3a", **PRIVATE | {"privacy__noise": 1.5})
    assert made.round()[1]["epsilon"] > 0


def test_by_the_policy_of_a_site_it_does_not_test_on_training_images(
    domains: list[Node], tmp_path: Path
) -> None:
    """Whatever noise the request names: the server writes that."""
    nodes = annas_tests_taken(domains, tmp_path)
    made = Bench(ruled(nodes, "[privacy]\nnoise = 1.0", tmp_path), "fedavg", rounds=1)
    made.begin()
    request = made.strategy.request(made.strategy.roster.sources[0], {"model": made.strategy.model})
    arrays, tables = records.read(request.content)
    tables["step"]["hop"] = "calibrate"
    request.content = records.write(arrays, **tables)
    request.metadata.message_type = "evaluate"
    reply = made.grid.call(request)
    assert reply.has_error() and reply.error.code == Code.POLICY


def test_a_site_with_a_budget_of_epsilon_answers_no_run_without_noise(
    domains: list[Node], tmp_path: Path
) -> None:
    made = Bench(ruled(domains, "[privacy]\nepsilon = 1.0", tmp_path), "fedavg")
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}


@pytest.mark.slow
def test_training_stops_at_the_budget_over_all_runs(domains: list[Node], tmp_path: Path) -> None:
    *others, first = sorted(SOURCES, key=lambda site: after(site, 2))
    most = (after(others[-1], 2) + after(first, 2)) / 2
    assert most > after(first, 1)
    nodes = ruled(domains, f"[privacy]\nepsilon = {most}", tmp_path)
    made = Bench(nodes, "fedavg", rounds=2, **PRIVATE)
    assert made.round(1)[1]["epsilon"] == pytest.approx(after(first, 1))
    made.round(2)  # without the site that has spent the most
    assert set(made.strategy.weights) == {*others}
    assert failures(made) == {(first, int(Code.BUDGET))}
    resident.cache_clear()
    again = Bench(nodes, "fedavg", run__name="another", **PRIVATE)
    with pytest.raises(QuorumError):  # no site has enough left for a round more
        again.round(1)
    assert (first, int(Code.BUDGET)) in failures(again)
    spent = Spent(tmp_path / first, Budget())
    assert spent.epsilon(1e-5) == pytest.approx(after(first, 1))  # a refusal books nothing


def test_steps_are_booked_before_they_are_taken(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends in mid-round has spent what it may have used."""
    nodes = ruled(domains, "", tmp_path)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noised, "_clipped_gradient", dies)
    made = Bench(nodes, "fedavg", **PRIVATE)
    with pytest.raises(KeyboardInterrupt):
        made.round()
    spent = [Spent(tmp_path / s, Budget()).epsilon(1e-5) for s in SOURCES]
    assert any(e == pytest.approx(after(s, 1)) for s, e in zip(SOURCES, spent, strict=True))


def test_the_budget_by_hand(tmp_path: Path) -> None:
    spent = Spent(tmp_path, Budget())
    assert spent.epsilon(1e-5) == 0.0
    first = spent.steps((1.0, 0.1, 10), Privacy())
    second = spent.steps((2.0, 0.1, 10), Privacy(epsilon=100.0))
    assert 0 < first < second == epsilon([(1.0, 0.1, 10), (2.0, 0.1, 10)], 1e-5)
    with pytest.raises(BudgetError, match="over all runs"):
        spent.steps((1.0, 0.1, 10), Privacy(epsilon=0.5))
    assert spent.epsilon(1e-5) == second


def test_only_fedavgs_own_training_is_noised() -> None:
    """A method that may train privately has no training of its own beside this one."""
    makers: list[Callable[..., Any]] = [fedavg.Source.train, fedprox.Source.train]
    assert len({maker.__qualname__ for maker in makers}) == 1


# ---- over processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_whose_budget_is_spent_leaves_and_the_run_goes_on(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    most = (after("bert", 2) + after("bert", 3)) / 2
    policy.write_text(f"[protect]\nmin-images = 16\n[privacy]\nepsilon = {most}\n")
    options = {"bert": ["--policy", str(policy)]}
    with Federation(tmp_path / "hub", client_options=options) as hub:
        settings = {"method": "fedavg", "rounds": 3, "privacy.noise": 1.0, "model.norm": "group"}
        found = hub.begin("noised", settings).finish()
    entries = rounds(found, "fedavg")
    assert set(entries) == {1, 2, 3}
    took = [t for t, e in entries.items() if "bert" in e["weights"]]
    assert took == [1, 2]
    assert all(e["epsilon"] > 0 and "loss" not in e for e in entries.values())
