"""Differential privacy of a source's examples: DP-SGD, its accountant, and the site's budget."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import nn
from torch.nn import functional as F

from clients import fedavg, fedprox
from clients.policy.budget import Spent
from clients.policy.rules import Budget, Policy, Privacy
from clients.site import blocks, noised
from clients.site.memory import resident
from fedda import models, records
from fedda.config import LEAST_CLIP, ModelConfig, PrivacyConfig, TrainConfig
from fedda.errors import BudgetError, Code, ConfigError, QuorumError
from fedda.models import Model, batchnorms
from fedda.secure.accountant import epsilon
from fedda.settings import RunConfig, Task
from fedda.wire import packing
from tests import local_grid
from tests.local_grid import EXAMPLES, SOURCES, Bench, Node, failures, keyed, sent_by

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


def steps_of(few: Few, batch: list[int], about: dict[str, float], **more: Any) -> torch.Tensor:
    """A network's gradient after a step over these examples, a second time -> (P,)."""
    settings = PrivacyConfig.model_construct(None, **{"noise": 0.0, "clip": 1.0} | about)
    indices = torch.tensor(batch, dtype=torch.long)
    inner = torch.optim.SGD(few.model.parameters(), lr=0.1)
    with noised.per_example(few.model):
        for _ in range(2):  # nothing is left over from the step before
            noised.noisy_gradient(
                inner,
                lambda part: F.cross_entropy(few.model(few.x[part]), few.y[part]),
                indices,
                settings,
                expected=6,
                draws=np.random.default_rng(3),
                **more,
            )
    assert not any(hasattr(p, "grad_sample") for p in few.model.parameters())  # nothing stays
    return torch.cat([p.grad.flatten() for p in few.model.parameters()])  # type: ignore[union-attr]


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


@pytest.mark.parametrize("memory", [2, 2**24])
@pytest.mark.parametrize("clip", [0.05, 1.0, 50.0])
def test_a_step_clips_each_examples_gradient(clip: float, memory: int) -> None:
    few, batch = Few(network(), 12), [0, 3, 4, 7, 9]
    wanted = torch.cat([g.flatten() for g in twin(few, batch, clip, 6)])
    found = steps_of(few, batch, {"clip": clip}, memory=memory)
    assert torch.allclose(found, wanted, atol=2e-6 * max(1.0, clip))


def test_the_noise_has_its_size() -> None:
    noise = steps_of(Few(network(), 4), [], {"noise": 1.7, "clip": 0.3})
    assert len(noise) > 200_000
    assert float(noise.std()) == pytest.approx(1.7 * 0.3 / 6, rel=0.02)
    assert abs(float(noise.mean())) < 4 * float(noise.std()) / len(noise) ** 0.5


def test_an_example_whose_gradient_is_not_finite_counts_as_none() -> None:
    few = Few(network(), 6)
    wanted = steps_of(few, [0, 2, 3], {})
    few.x[[1, 4]] = torch.tensor([float("nan"), float("inf")])[:, None, None, None]
    found = steps_of(few, [0, 1, 2, 3, 4], {})
    assert torch.allclose(found, wanted, atol=1e-7)
    few.x[[1, 4]] = -few.x[[4, 1]]
    assert torch.equal(steps_of(few, [0, 1, 2, 3, 4], {}), found)  # nor does how it is not finite


# ---- two neighbours ------------------------------------------------------------------------------


def overflowing() -> nn.Module:
    """A small network whose first layer overflows for an image that is not black in its corner."""
    model = models.build(ModelConfig(name="mlp", hidden="6", norm="group"), (1, 8, 8), 4, 0)
    next(model.parameters()).data[:, 0] = 3e38
    return model


def of_one_pixel() -> nn.Module:
    """Two numbers, of which each image that is not black changes one as much as the clip allows."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    return model


def replies(
    make: Callable[[], nn.Module], x: torch.Tensor, noise: float, clip: float, count: int
) -> np.ndarray:
    """What a source with these images answers, so often, to the same request -> (count, P)."""
    found = []
    for seed in range(count):
        few: Any = Few(make(), len(x))  # type: ignore[arg-type]
        few.x, few.y, few.data = x, torch.zeros(len(x), dtype=torch.long), x
        few.generator = lambda of, s=seed: torch.Generator().manual_seed(2 * s + (of == "noise"))
        few.optimizer = lambda few=few: torch.optim.SGD(few.model.parameters(), lr=1.0)
        few.request, few.device = SimpleNamespace(round=1), torch.device("cpu")
        few.task = SimpleNamespace(
            privacy=PrivacyConfig.model_construct(noise=noise, clip=clip),
            train=TrainConfig(batch_size=len(x)),
        )
        gate = SimpleNamespace(books=False, policy=Policy())
        few.site = SimpleNamespace(reproducible=True, gate=gate)
        noised.train(few, few.labels, few.penalty)
        moved = zip(few.model.parameters(), few.start, strict=True)
        found.append(torch.cat([(p - q).double().flatten() / clip for p, q in moved]))
    return torch.stack(found).detach().numpy()


def least_epsilon(a: np.ndarray, b: np.ndarray, delta: float) -> float:
    """What epsilon is at least, by how well two sites' answers (n, P) can be told apart.

    A direction is chosen by one half of the answers. For each threshold along it, the other half
    bounds both chances of being beyond, with an error of 1 in 10,000.
    """
    n, found = len(a) // 2, 0.0
    finite = np.isfinite([*a, *b]).all()
    w = a[:n].mean(axis=0) - b[:n].mean(axis=0) if finite else np.zeros(a.shape[1])
    u, v = (np.array([r @ w if np.isfinite(r).all() else 1e300 for r in s[n:]]) for s in (a, b))
    for one, other in ((u, v), (v, u), (-u, -v), (-v, -u)):
        for t in one:
            low = beta.ppf(1e-4, (one >= t).sum(), n - (one >= t).sum() + 1)
            high = beta.ppf(1 - 1e-4, (other >= t).sum() + 1, n - (other >= t).sum())
            if low > delta and np.isfinite(high):
                found = max(found, float(np.log((low - delta) / high)))
    return found


def lit(lit: int, of: int, pixels: int) -> torch.Tensor:
    """Images, of which so many are white in the corner and all are black elsewhere."""
    x = torch.zeros(of, 1, pixels, pixels)
    x[:lit, 0, 0, 0] = 1
    return x


@pytest.mark.parametrize(
    ("make", "clip", "x", "other"),
    [
        (of_one_pixel, 1.0, lit(3, 5, 1), lit(4, 5, 1)),
        (overflowing, 1.0, lit(0, 5, 8), lit(1, 5, 8)),
        # With a smaller clip, which a site refuses, float32 would round sums to 0 and to 1 of it.
        (of_one_pixel, LEAST_CLIP, lit(100, 600, 1), lit(101, 600, 1)),
    ],
    ids=["plain", "overflow", "least clip"],
)
def test_two_neighbours_cannot_be_told_apart(
    make: Callable[[], nn.Module], clip: float, x: torch.Tensor, other: torch.Tensor
) -> None:
    """Two sites that differ in one image."""
    first, second = (replies(make, each, 8.0, clip, 200) for each in (x, other))
    # Another image in its place is one example less and one more: twice as far.
    assert least_epsilon(first, second, 1e-5) <= epsilon([(8.0 / 2, 1.0, 1)], 1e-5)


def test_what_tells_two_sites_apart_finds_what_is_not_hidden() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 200, 7))
    assert least_epsilon(a, b, 1e-5) == 0.0
    assert least_epsilon(a + 4, b, 1e-5) > 2
    assert least_epsilon(a, np.full_like(a, np.nan), 1e-5) > 2


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
    steps_of(few, [0, 1], {"clip": 0.1})
    before = [p.grad.clone() for p in few.model.parameters()]
    noised._penalty_gradient(few.model, few.penalty())
    for p, g in zip(few.model.parameters(), before, strict=True):
        assert torch.allclose(p.grad, g + 2.0)  # mu (w - w_t + 1) at w = w_t


def after(site: str, rounds: int) -> float:
    """Epsilon of a site after so many rounds of an epoch each."""
    N = EXAMPLES[site]
    return epsilon([(1.0, 16 / N, round(N / 16) * rounds)], 1e-5)


# ---- rounds --------------------------------------------------------------------------------------

NOISED = pytest.mark.nightly("clients/site/noised.py", "clients/fedavg.py", "clients/fedprox.py")


@pytest.mark.parametrize(
    "method", ["kd3a", *(pytest.param(m, marks=NOISED) for m in ("fedavg", "fedprox"))]
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
    assert all(c.numbers == {"epsilon", "steps"} for c in sent if c.kind == "train")
    assert not any("running" in name for name in model)


@pytest.mark.nightly("clients/policy", "clients/site/output_privacy.py", "fedda/secure")
def test_it_goes_with_secure_sums_and_with_sealed_models(
    domains: list[Node], tmp_path: Path
) -> None:
    nodes = keyed(domains, tmp_path)
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


def test_no_example_can_make_a_source_refuse(domains: list[Node]) -> None:
    """A made model whose gradients are infinite is answered as any other, and without a time."""
    made = Bench(domains, "fedavg", rounds=1, **PRIVATE)
    made.begin()
    model = {
        n: (1e38 * np.sign(a)).astype(a.dtype) for n, a in made.strategy.model.unpack().items()
    }
    sent = {"model": packing.pack(model, packing.Kind.MODEL)}
    reply = made.grid.call(made.strategy.request(made.strategy.roster.sources[0], sent))
    assert not reply.has_error()
    assert {*records.read(reply.content)[1]["metrics"]} == {"epsilon", "steps"}


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
        ({"privacy.clip": 5e-45}, "noise of its size would be rounded away; set it to 0.000001"),
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
    states = [n | {"state-dir": str(folder / n["name"])} for n in nodes]
    return local_grid.ruled(states, text, folder, audited=True)


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
    nodes = ruled(domains, "[allow]", tmp_path)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noised, "noisy_gradient", dies)
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
