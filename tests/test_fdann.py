"""f-DANN over four sites: the encoders reverse the discriminator's gradient."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clients.shared.shared_discriminator import Copy
from clients.site import origin
from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import HALVES
from fedda.adversarial.travelling import travelling_layout
from fedda.settings import RunConfig, presets
from fedda.train import learning_rate
from fedda.wire import Role, packing
from fedda.wire.packing import Kind
from tests.adversarial_runs import SETTINGS, WIDTH, arrays, assert_as_in_one_place, cases, run
from tests.local_grid import Bench, Node


@cases((1, True), (3, False))
def test_four_sites_compute_the_same_as_one_plain_loop(
    domains: list[Node], tmp_path: Path, p: int, pairs: bool
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fdann", p, pairs)


def test_a_reversed_gradient_gives_what_one_plain_loop_gives(
    domains: list[Node], tmp_path: Path
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fdann", 3, False, loss="reversal")


class Rising(nn.Module):
    """A discriminator of one feature whose logit is the feature itself."""

    def forward(self, z: Tensor) -> Tensor:
        return z[:, 0]


@pytest.mark.parametrize(
    ("side", "v", "inverted", "reversed_"),
    [
        # DI is sure, and wrong: the target's features pass for a source's. Nothing is left to do,
        # but the reversed gradient is the largest.
        ("target", 30.0, 0.0, -1.0),
        ("source", -30.0, 0.0, 1.0),
        # DI is sure, and right: only inverted labels still pull.
        ("target", -30.0, -1.0, 0.0),
        ("source", 30.0, 1.0, 0.0),
        ("target", 0.0, -0.5, -0.5),
        ("source", 0.0, 0.5, 0.5),
    ],
)
def test_inverted_labels_stop_where_the_discriminator_is_deceived(
    side: Role, v: float, inverted: float, reversed_: float
) -> None:
    z = torch.full((2, 1), v, requires_grad=True)
    for loss, slope in (
        (discriminators.inverted_loss(side, Rising(), z), inverted),
        (discriminators.reversed_loss(HALVES["grl", side], Rising(), z), reversed_),
    ):
        (g,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(g, torch.full((2, 1), slope / 2))


def test_the_paper_reverses_gradients_and_lets_all_rates_fall_as_ganin_does() -> None:
    config = RunConfig.parse({"method": "fdann"} | presets.settings("fdann", ["paper"]))
    assert config.options["fdann"].reversal.loss == "reversal"
    rates = [learning_rate(config.train, t, 11) for t in (1, 2, 11)]
    assert rates == pytest.approx([0.01, 0.01 * 2**-0.75, 0.01 * 11**-0.75])


def test_models_and_gradients_cross_and_are_counted(domains: list[Node], tmp_path: Path) -> None:
    """As many bytes as two rounds of two sums need; each site has the model, a source thrice."""
    training = run(domains, tmp_path, "fdann")
    least = 2 * 4 * discriminators.count(WIDTH, (8,))
    network = RunConfig.parse(SETTINGS).options["fdann"].discriminator
    for t, entry in enumerate(training["rounds"]):
        for way in (f"{way} {role}" for way in ("to", "from") for role in ("source", "target")):
            members = 3 if "source" in way else 1
            # The frames have headers.
            assert 0 < entry["bytes"][f"{way} gradient"] / members - least < 2 * 64 + 400
        assert len(arrays(entry)) == 2 * 2 * 2  # models and gradients alone
        assert {"loss", "discriminator-loss", "discriminator-accuracy"} <= set(entry)
        m = entry["bytes"]["from source model"] / 3
        D = entry["bytes"]["from target model"] - m  # the discriminator, sent by the target
        assert 0 <= D - travelling_layout(WIDTH, network).nbytes < 300
        sent = D if t else 0  # in the first round each site builds it
        assert entry["bytes"]["to source model"] == 3 * (m + sent)
        # For its test, and in the first round to train with; later it keeps that of the test.
        assert entry["bytes"]["to target model"] == (1 if t else 2) * m + sent
    assert training["rounds"][-1]["loss"] < training["rounds"][0]["loss"]


def test_a_run_with_one_window_per_round_and_overlap_completes(
    domains: list[Node], tmp_path: Path
) -> None:
    settings = {"exchange.overlap": True, "exchange.p": 4}
    found = run(domains, tmp_path, "fdann", **settings)
    assert len(found["rounds"]) == 2


def test_after_a_round_away_no_state_of_the_servers_carries_a_copy_off(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(
        [n | {"state-dir": str(tmp_path), "audited": True} for n in domains], "fdann", rounds=3
    )
    bench.round()
    bench.grid.offline = {"anna"}
    bench.round(2)
    bench.grid.offline = set()
    ((name, packed),) = bench.strategy.memory.arrays.items()
    made = {n: a.copy() for n, a in packed.unpack().items()}
    made["sync"][:], made["exp_avg"][:], made["exp_avg_sq"][:] = 1e6, 1e6, 0.0
    bench.strategy.memory.arrays[name] = packing.pack(made, Kind.MODEL)
    far: list[float] = []

    def move(self: Copy) -> None:
        real(self)
        values = {n: t.detach().numpy() for n, t in self.DI.state_dict().items()}
        far.append(origin.farthest(values, made)[0])

    real = Copy.move
    monkeypatch.setattr(Copy, "move", move)
    bench.round(3)
    assert far and max(far) < 0.1
