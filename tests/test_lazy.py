"""Lazy synchronisation: the windows of algorithm 1, their protection, and their saved state."""

import copy
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from fedda.adversarial import discriminators
from fedda.adversarial.lazy import Flat, LazySync, protect, syncs
from fedda.errors import ExchangeError, NotFiniteError
from fedda.train import generator
from tests.reference import lazy as twin

few = settings(max_examples=40, deadline=None)


class Script:
    """A stream whose other members send what a list says; it records the calls in order."""

    def __init__(self, others: list[list[float]] | None = None) -> None:
        self.others = others or []
        self.calls: list[str] = []
        self.sent: list[Flat] = []
        self.examples: list[int] = []

    def send(self, group: str, gradient: Flat, examples: int) -> None:
        assert gradient.dtype == np.float32 and gradient.ndim == 1
        self.calls.append("send")
        self.sent.append(gradient.copy())
        self.examples.append(examples)

    def receive(self, group: str) -> Flat:
        self.calls.append("receive")
        received = self.calls.count("receive") - 1
        other = self.others[received] if self.others else [0.0]
        total = self.sent[received] + np.asarray(other, np.float32)
        total.setflags(write=False)  # like an array of a received buffer
        return total


def rows(values: list[Tensor | None]) -> list[list[float] | None]:
    return [None if v is None else v.tolist() for v in values]


def seen(n: int) -> Tensor:
    """The features of n examples."""
    return torch.zeros(n, 1)


# ---- windows -----------------------------------------------------------------------------------


def test_windows_by_hand() -> None:
    """Windows of two steps: own gradients 1, 3 and 5, 7; another site's means 4 and 10."""
    stream = Script([[4.0], [10.0]])
    lazy = LazySync(stream, "DI", 2)
    found = [lazy.step(torch.tensor([g]), seen(50)) for g in (1.0, 3.0, 5.0, 7.0, 9.0)]
    # Step 2: G / p = (1 + 3) / 2 = 2, so (2 + 4) / 2 = 3 until step 4: (6 + 10) / 2 = 8.
    assert rows(found) == [None, [3.0], [3.0], [8.0], [8.0]]
    assert [s.tolist() for s in stream.sent] == [[2.0], [6.0]]
    assert stream.examples == [100, 100]
    assert lazy.steps == 5


def test_two_groups_are_both_sent_before_either_sum_is_awaited() -> None:
    stream = Script([[4.0], [10.0]])
    groups = [LazySync(stream, name, 1) for name in ("a", "b")]
    for lazy, g in zip(groups, (2.0, 6.0), strict=True):
        lazy.put(torch.tensor([g]), seen(50))
    assert stream.calls == ["send", "send"]
    assert rows([lazy.take() for lazy in groups]) == [[3.0], [8.0]]
    assert rows([lazy.take() for lazy in groups]) == [[3.0], [8.0]]  # nothing more is on its way


def test_overlap_by_hand() -> None:
    """What was sent at step 2 is used from step 4 on, and is received only then."""
    stream = Script([[4.0], [10.0]])
    lazy = LazySync(stream, "DI", 2, overlap=True)
    found = [lazy.step(torch.tensor([g]), seen(50)) for g in (1.0, 3.0, 5.0)]
    assert rows(found) == [None, None, None] and stream.calls == ["send"]
    found = [lazy.step(torch.tensor([g]), seen(50)) for g in (7.0, 9.0, 11.0)]
    assert rows(found) == [[3.0], [3.0], [8.0]]
    assert stream.calls == ["send", "receive", "send", "receive", "send"]


@st.composite
def runs(draw: st.DrawFn) -> list[list[list[float]]]:
    steps, members = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    number = st.floats(-100, 100, width=32)
    return draw(
        st.lists(
            st.lists(st.lists(number, min_size=2, max_size=2), min_size=members, max_size=members),
            min_size=steps,
            max_size=steps,
        )
    )


@few
@given(runs(), st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_applied_gradients_equal_the_twins(
    gradients: list[list[list[float]]], p: int, overlap: bool, halves: int
) -> None:
    windows = [gradients[i : i + p] for i in range(0, len(gradients) - p + 1, p)]
    others = [
        (torch.tensor(w, dtype=torch.float64)[:, 1:].sum(dim=(0, 1)) / p).tolist() for w in windows
    ]
    lazy = LazySync(Script(others), "DI", p, halves=halves, overlap=overlap)
    found = [lazy.step(torch.tensor(step[0], dtype=torch.float64), seen(1)) for step in gradients]
    expected = twin.applied(gradients, p, halves, overlap)
    for ours, theirs in zip(rows(found), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours == pytest.approx(theirs, rel=1e-4, abs=1e-3)


@few
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_sync_up_steps_are_counted(done: int, steps: int, p: int) -> None:
    assert syncs(done, steps, p) == sum(n % p == 0 for n in range(done + 1, done + steps + 1))


def test_gradients_are_copied_when_they_are_given() -> None:
    """The caller may change its tensor later, and the result has its device and precision."""
    lazy = LazySync(Script(), "DI", 2)
    g = torch.ones(1, dtype=torch.float64, requires_grad=True)
    lazy.step(g, seen(1))
    with torch.no_grad():
        g.mul_(100)
    found = lazy.step(torch.ones(1, dtype=torch.float64), seen(1))
    assert found is not None and found.tolist() == [0.5]
    assert found.dtype == torch.float64 and not found.requires_grad


# ---- protection of a window --------------------------------------------------------------------


def test_clip_by_hand() -> None:
    """(3, 4), of length 5, becomes (1.5, 2), of length 2.5; (.6, .8), of length 1, stays."""
    assert protect(torch.tensor([3.0, 4.0]), 2.5).tolist() == [1.5, 2.0]
    assert protect(torch.tensor([0.6, 0.8]), 2.5).tolist() == pytest.approx([0.6, 0.8])
    assert protect(torch.tensor([30.0, 40.0]), 0.0).tolist() == [30.0, 40.0]
    assert protect(torch.zeros(2), 2.5).tolist() == [0.0, 0.0]


@few
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_clip_equals_the_twins(values: list[float], clip: float) -> None:
    found = protect(torch.tensor(values, dtype=torch.float64), clip)
    assert found.tolist() == pytest.approx(twin.protect(values, clip), rel=1e-9, abs=1e-12)
    assert float(found.norm()) <= clip * (1 + 1e-9)


def test_a_windows_mean_is_clipped_not_each_step() -> None:
    """Steps of 8 and -2 have the mean 3, which stays; clipped one by one they would give .5."""
    stream = Script()
    lazy = LazySync(stream, "DI", 2, clip=3.0)
    for g in (8.0, -2.0, 9.0, 9.0):
        lazy.step(torch.tensor([g]), seen(1))
    assert [s.tolist() for s in stream.sent] == [[3.0], [3.0]]


def test_each_half_is_clipped_by_itself_before_its_share_is_taken() -> None:
    """Two sources and the target, all beyond the clip: the sources together weigh as the target.

    Clipped after the shares were taken, the sources' halves (5 each) would not be touched.
    """
    sent = []
    for share, g in ((0.5, 10.0), (0.5, 10.0), (1.0, -10.0)):
        stream = Script()
        LazySync(stream, "DI", 1, clip=6.0, share=share).step(torch.tensor([g]), seen(1))
        sent.append(stream.sent[0].item())
    assert sent == [3.0, 3.0, -6.0]


def test_it_counts_how_often_the_clip_binds_unless_noise_hides_that() -> None:
    lazy, noisy = (LazySync(Script(), "DI", 2, clip=3.0, noise=noise) for noise in (0.0, 0.1))
    assert lazy.clipped is None
    for g in (8.0, -2.0, 9.0, 9.0, 1.0, 1.0, 0.0, 6.1):  # means of 3, 9, 1 and 3.05
        lazy.step(torch.tensor([g]), seen(1))
        noisy.step(torch.tensor([g]), seen(1))
    assert lazy.clipped == 0.5
    assert noisy.clipped is None


def test_noise_has_the_given_spread_and_its_own_generator() -> None:
    draws = generator("noise")
    g = torch.zeros(20_000)
    before = torch.get_rng_state()
    found = protect(g, 2.0, 0.5, draws)  # std = .5 * 2 = 1
    assert float(found.std()) == pytest.approx(1.0, rel=0.02)
    assert abs(float(found.mean())) < 0.03
    assert torch.equal(torch.get_rng_state(), before)
    assert protect(g, 2.0, 0.5, generator("noise")).equal(found)
    assert not protect(g, 2.0, 0.5, draws).equal(found)


def test_the_noise_of_sent_gradients_comes_from_no_torch_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only 32 bits of a torch seed count: whoever tries them all can subtract the noise."""
    near, far = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**40)
    assert torch.randn(9, generator=near).equal(torch.randn(9, generator=far))

    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("torch's draws")

    monkeypatch.setattr(torch, "randn", never)
    before = torch.get_rng_state()
    stream = Script()
    lazy = LazySync(stream, "DI", 1, clip=2.0, noise=0.5)  # std = .5 * 2 = 1
    for _ in range(2):
        lazy.step(torch.zeros(20_000), seen(1))
    for sent in stream.sent:
        assert float(sent.std()) == pytest.approx(1.0, rel=0.02)
        assert abs(float(sent.mean())) < 0.03
    one, other = stream.sent
    assert abs(float(np.corrcoef(one, other)[0, 1])) < 0.05
    assert torch.equal(torch.get_rng_state(), before)


def test_a_window_over_too_few_examples_is_not_sent() -> None:
    stream = Script()
    lazy = LazySync(stream, "DI", 2, min_examples=256)
    lazy.step(torch.tensor([1.0]), seen(128))
    lazy.step(torch.tensor([1.0]), seen(128))  # 256 are enough
    lazy.step(torch.tensor([1.0]), seen(128))
    with pytest.raises(ExchangeError, match=r"255 examples.*takes 256.*exchange\.p"):
        lazy.step(torch.tensor([1.0]), seen(127))
    assert len(stream.sent) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_sent(bad: float) -> None:
    stream = Script()
    with pytest.raises(NotFiniteError, match="learning rates"):
        LazySync(stream, "DI", 1, clip=1.0).step(torch.tensor([bad]), seen(1))
    assert stream.sent == []


def test_through_noise_nobody_hears_of_a_gradient_that_is_not_finite() -> None:
    """A refusal would tell one bit of one example, however large the noise."""
    stream = Script()
    LazySync(stream, "DI", 1, clip=1.0, noise=0.5).step(torch.tensor([math.nan]), seen(1))
    assert np.isfinite(stream.sent).all() and len(stream.sent) == 1


# ---- saved and restored ------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("cut", range(8))
def test_saving_and_restoring_at_any_step_changes_nothing(overlap: bool, p: int, cut: int) -> None:
    gradients = torch.randn(11, 4, generator=generator("cut"))

    def make() -> LazySync:
        return LazySync(Script(), "DI", p, overlap=overlap, min_examples=2 * p)

    whole = make()
    expected = [whole.step(g, seen(2)) for g in gradients]
    first = make()
    found = [first.step(g, seen(2)) for g in gradients[:cut]]
    saved = {name: t.clone() for name, t in first.state().items()}
    first.state()["steps"].fill_(99)  # changes a copy only
    second = make()
    second.restore(saved)
    if cut:
        for t in saved.values():
            t.fill_(7)  # `restore` has made copies
    found += [second.step(g, seen(2)) for g in gradients[cut:]]
    assert second.steps == 11
    assert rows(found) == rows(expected)


def test_state_waits_only_once_for_a_gradient_on_its_way() -> None:
    stream = Script()
    lazy = LazySync(stream, "DI", 1, overlap=True)
    assert set(lazy.state()) == {"steps"}
    lazy.step(torch.tensor([2.0]), seen(1))
    assert lazy.state()["arrived"].tolist() == [1.0]
    assert stream.calls == ["send", "receive"]
    assert set(lazy.state()) == {"steps", "arrived"} and len(stream.calls) == 2
    found = lazy.step(torch.tensor([4.0]), seen(1))
    assert found is not None and found.tolist() == [1.0]  # that of step 1


@pytest.mark.parametrize("overlap", [False, True])
def test_an_earlier_g_sync_is_used_until_there_is_another(overlap: bool) -> None:
    lazy = LazySync(Script(), "DI", 2, overlap=overlap)
    assert lazy.latest is None
    lazy.begin(torch.tensor([9.0]))
    found = [lazy.step(torch.tensor([g]), seen(1)) for g in (2.0, 4.0, 6.0, 8.0)]
    # Windows of mean 3 and 7, halved; with overlap the first is used from step 4 on.
    assert rows(found) == ([[9.0]] * 3 + [[1.5]] if overlap else [[9.0], [1.5], [1.5], [3.5]])
    lazy.settle()
    assert lazy.latest is not None and lazy.latest.tolist() == [3.5]


# ---- two sites, and algorithm 1 in one place ---------------------------------------------------


class Pair:
    """Sums the gradients of two threads, in the order of their names."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.frames: dict[str, Flat] = {}

    def end(self, name: str) -> "End":
        return End(self, name)


class End:
    def __init__(self, pair: Pair, name: str) -> None:
        self.pair, self.name = pair, name

    def send(self, group: str, gradient: Flat, examples: int) -> None:
        self.pair.frames[self.name] = gradient
        self.pair.barrier.wait()

    def receive(self, group: str) -> Flat:
        total = self.pair.frames["opt"] + self.pair.frames["target"]
        self.pair.barrier.wait()
        return total


def side(
    name: str,
    loss: discriminators.Loss,
    p: int,
    pair: Pair,
    E: nn.Module,
    DI: nn.Module,
    x: list[Tensor],
    rates: tuple[float, float],
) -> tuple[nn.Module, nn.Module]:
    """Run one node of algorithm 1 with fedda's functions."""
    role = "source" if name == "opt" else "target"
    half, draws = discriminators.HALVES[loss, role], generator("penalty", name)
    E, DI = copy.deepcopy(E), copy.deepcopy(DI)
    lazy = LazySync(pair.end(name), "DI", p)  # type: ignore[arg-type]
    encoder = optim.SGD(E.parameters(), lr=rates[0])
    discriminator = optim.SGD(DI.parameters(), lr=rates[1])
    for batch in x:
        z = E(batch)
        own = discriminators.discriminator_loss(half, DI, z, 10.0, draws)
        g = discriminators.flat_gradient(own, DI)
        if half.mapping:
            encoder.zero_grad()
            discriminators.mapping_loss(half, DI, z).backward()
            encoder.step()
        g_sync = lazy.step(g, z)
        if g_sync is not None:
            discriminators.set_gradient(DI, g_sync)
            discriminator.step()
    return E, DI


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([w.detach().reshape(-1) for w in module.parameters()])


def networks() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        E = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    return E, discriminators.Discriminator(4, (6, 5), seed=1)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    g = generator("batches")
    return [
        (torch.randn(9, 5, generator=g), torch.randn(7, 5, generator=g) + 1) for _ in range(steps)
    ]


def penalties(loss: str) -> Callable[[nn.Module, Tensor, str], Tensor] | None:
    if loss != "wassda":
        return None
    draws = {"source": generator("penalty", "opt"), "target": generator("penalty", "target")}

    def penalty(DI: nn.Module, z: Tensor, role: str) -> Tensor:
        return 10 * discriminators.gradient_penalty(DI, z, draws[role])

    return penalty


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("loss", ["adda", "grl", "wassda", "cada"])
def test_two_sites_compute_the_same_as_algorithm_1_in_one_place(
    loss: discriminators.Loss, p: int
) -> None:
    (E, DI), data = networks(), batches(20)
    rates = (0.05, 0.02 if loss == "wassda" else 0.2)  # with a penalty of 10 more diverges
    pair, trained = Pair(), {}

    def run(name: str, k: int) -> None:
        x = [batch[k] for batch in data]
        trained[name] = side(name, loss, p, pair, E, DI, x, rates)

    threads = [threading.Thread(target=run, args=(n, k)) for k, n in enumerate(("opt", "target"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    E_opt, E_T, whole = twin.algorithm_1(loss, E, DI, data, p, *rates, penalties(loss))
    (E_1, DI_1), (E_2, DI_2) = trained["opt"], trained["target"]
    for ours, theirs in ((DI_2, whole), (E_2, E_T), (E_1, E_opt)):
        torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=1e-4, atol=2e-6)
    assert parameters(DI_1).equal(parameters(DI_2))  # to the last bit
    assert parameters(E_1).equal(parameters(E)) == (loss != "cada")
    assert not torch.allclose(parameters(whole), parameters(DI), atol=1e-3)
    assert not torch.allclose(parameters(E_T), parameters(E), atol=1e-3)
