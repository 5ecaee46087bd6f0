"""What gradients tell of a critic's mean: by hand, and for critics that train as FRUDA's do."""

import pytest
import torch

from fedda.adversarial.critic_estimate import means_at_the_end, told
from fedda.adversarial.discriminators import (
    HALVES,
    Discriminator,
    bound,
    discriminator_loss,
    flat_gradient,
    set_gradient,
)
from fedda.adversarial.lazy import LazySync, protect
from fedda.train import generator
from tests.test_lazy import Script


def test_a_linear_critic_by_hand() -> None:
    """The critic is W z + b with a mean z of 3: at the end 1 * 3 + 2 = 5, whatever shortens g."""
    w = torch.tensor([[2.0, 1.0], [4.0, 0.0], [1.0, 2.0]])
    g = torch.tensor([[3.0, 1.0], [0.3, 0.1]])
    assert means_at_the_end(w, g, 2).tolist() == pytest.approx([5.0, 5.0])
    mean, off = told(w, g, 2, torch.tensor([4.0, 4.0]))
    assert (mean, off) == (pytest.approx(5.0), pytest.approx(0.1 * 1 + 0.02 * 6))


def test_two_batches_that_differ_by_hand() -> None:
    """Means of z of 2 and 4: 2 * 2 - (2 + 4) / 2 = 1, and 1 * 4. The rule adds -(4 - 2) / 2."""
    w = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    g = torch.tensor([[2.0, 1.0], [4.0, 1.0]])
    assert means_at_the_end(w, g, 2).tolist() == [1.0, 4.0]
    mean, off = told(w, g, 2, torch.tensor([2.5, 0.5]))  # 1.5 on average, and as far apart
    assert (mean, off) == (2.5, pytest.approx(3 * (1.5 + 1) + 0.1 * (1 + 1) + 0.02 * 3.5))


@pytest.mark.parametrize("sizes", [(), (20,), (16, 8)])
@pytest.mark.parametrize("clip", [1e9, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_honest_means_are_within_and_an_absent_distance_is_not(
    sizes: tuple[int, ...], clip: float, seed: int
) -> None:
    """Critics that train over batches, with a bound on their norms and shortened gradients."""
    draws = generator("critic mean", seed)
    z = torch.randn(400, 6, generator=draws).relu()
    z_T = torch.randn(400, 6, generator=draws).relu() + torch.rand(6, generator=draws)
    DI = Discriminator(6, sizes, seed)
    optimizer = torch.optim.Adam(DI.parameters(), lr=0.02, betas=(0.5, 0.999))
    w, g = [], []
    for _ in range(60):
        w.append(torch.cat([p.detach().reshape(-1) for p in DI.parameters()]).double())
        i, j = (torch.randperm(400, generator=draws)[:200] for _ in range(2))
        L_S = discriminator_loss(HALVES["wassda", "source"], DI, z[i])
        L_T = discriminator_loss(HALVES["wassda", "target"], DI, z_T[j])
        g_S, g_T = (protect(flat_gradient(L, DI), clip) for L in (L_S, L_T))
        g.append(-g_S.double())
        set_gradient(DI, (g_S + g_T) / 2)
        optimizer.step()
        bound(DI)
    w.append(torch.cat([p.detach().reshape(-1) for p in DI.parameters()]).double())
    with torch.no_grad():
        v, v_T = DI(z), DI(z_T)
    last = (sizes or (6,))[-1] + 1
    mean, off = told(torch.stack(w[-6:]), torch.stack(g[-5:]), last, v_T)
    assert abs(mean - float(v.mean())) < off
    assert abs(mean - float(v_T.mean())) > 1.5 * off  # what a liar says to be near


@pytest.mark.parametrize("overlap", [False, True])
def test_the_others_part_of_each_sum_is_heard_once(overlap: bool) -> None:
    lazy, heard = LazySync(Script([[4.0], [10.0], [3.0]]), "DI", 1, overlap=overlap), []
    lazy.heard = lambda g: heard.append(g.tolist())
    for own in (1.0, 3.0, 5.0):
        lazy.step(torch.tensor([own]), torch.zeros(50, 1))
    lazy.settle()
    assert heard == [[4.0], [10.0], [3.0]]
