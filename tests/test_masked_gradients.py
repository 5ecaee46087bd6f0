"""Masked sums of gradients: the fixed point, the agreement on keys, and whole rounds."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from clients.site.remembered import Remembered
from fedda import exchange
from fedda.errors import (
    Code,
    ConfigError,
    DataError,
    ExchangeError,
    NotFiniteError,
    PolicyError,
    QuorumError,
    SecureError,
)
from fedda.exchange import Group, LocalHost, in_process
from fedda.exchange.groups import KEYS, Invitation
from fedda.exchange.masked import GradientPoint, MaskedGroup, agreement, tell
from fedda.halves import load_half
from fedda.secure.agree import Occasion, Own
from fedda.settings import RunConfig
from server.journal import Journal
from server.simulation import simulate
from tests.adversarial_runs import run
from tests.local_grid import Bench, Node, assert_close, keyed, ruled, settings_of
from tests.sockets import AT, remote

pytestmark = pytest.mark.usefixtures("fresh_sites")

SITES = ("anna", "bert", "carl")
SIZE, SYNCS = 50, 4
GROUP = Group("gradient", SIZE, SYNCS, SITES, masked=True)


def gradient(site: str, index: int) -> np.ndarray:
    return np.random.default_rng([ord(site[0]), index]).normal(size=SIZE).astype(np.float32)


# ---- the fixed point -----------------------------------------------------------------------------


def test_the_fixed_point_by_hand() -> None:
    point = GradientPoint(clip=10, noise=0, members=3)  # 4 bits for 10, 2 bits for 3 sites
    assert (point.bits, point.largest) == (24, 10)
    values = point.encode(np.array([1.0, -0.5, 10.0], np.float32))
    assert values.tolist() == [2**24, 2**32 - 2**23, 10 * 2**24]
    assert point.decode(values).tolist() == [1.0, -0.5, 10.0]
    assert GradientPoint(10, 1, 3).bits == 21  # 90 takes 7 bits


@pytest.mark.parametrize("members", [2, 3, 17])
def test_the_largest_sum_does_not_overflow(members: int) -> None:
    point = GradientPoint(10, 0, members)
    for sign in (1, -1):
        one = point.encode(np.array([sign * 10.0], np.float32))
        total = np.add.reduce([one] * members, dtype=np.uint32)
        rounding = members / 2 * 2.0**-point.bits  # half a step per site
        assert point.decode(total)[0] == pytest.approx(sign * 10 * members, abs=rounding)


def test_what_does_not_fit_is_refused() -> None:
    point = GradientPoint(1, 0, 2)
    with pytest.raises(SecureError, match=r"above 1, .*raise exchange.noise"):
        point.encode(np.array([1.5], np.float32))
    with pytest.raises(NotFiniteError):
        point.encode(np.array([np.nan], np.float32))
    with pytest.raises(ConfigError, match=r"exchange.clip is 1e\+09"):
        RunConfig.parse({"method": "fdann", "exchange.masked": True, "exchange.clip": 1e9})


# ---- a session -----------------------------------------------------------------------------------


def taking_part(invitation: Invitation, change: Callable[[bytes], bytes] = bytes) -> Any:
    """One site's part: agree on keys, then do all syncs -> what it got, and its plain point."""
    name = invitation.node
    with exchange.connect(invitation, AT) as stream:
        own = Own(Occasion("run", 1, 1, "exchange"))
        told = tell(stream, invitation.groups[-1], change(own.public + bytes(132)))
        known = {site: public for site, (public, _) in told.items()}
        seeds = own.seeds(name, known, b"agreed")
        masked = MaskedGroup(stream, seeds, GradientPoint(10, 0, len(SITES)))
        sums = []
        for index in range(SYNCS):
            masked.send("gradient", gradient(name, index), 256)
            sums.append(masked.receive("gradient"))
        return sums


def played(host: Any, work: Callable[[Invitation], Any] = taking_part) -> tuple[list[Any], Any]:
    groups = [GROUP, agreement([GROUP])]
    with host.open(groups, join=10, wait=10, rejoin=1) as session:
        with ThreadPoolExecutor(len(SITES)) as pool:
            done = [pool.submit(work, session.invitations[site]) for site in SITES]
        return [each.exception() or each.result() for each in done], session.fewest()


@pytest.mark.parametrize("make", [LocalHost, remote])
def test_the_sum_is_the_plain_one_to_the_fixed_points_step(make: Any) -> None:
    found, fewest = played(make())
    plain = [sum(gradient(s, i).astype(np.float64) for s in SITES) for i in range(SYNCS)]
    rounding = 3 / 2 * 2.0 ** -GradientPoint(10, 0, 3).bits  # half a step per site
    for sums in found:
        assert np.abs(np.array(sums) - plain).max() <= rounding + 1e-6
        assert np.array_equal(sums, found[0])  # the same bits at every site
    assert set(fewest.values()) == {256}  # the sum of keys is over no examples


def test_an_invitation_says_that_a_group_is_masked() -> None:
    with LocalHost().open([GROUP, agreement([GROUP])], join=1, wait=1) as session:
        invitation = session.invitations["bert"]
        assert Invitation.parse(invitation.flat()) == invitation
        assert [group.masked for group in invitation.groups] == [True, True]
        assert invitation.groups[1].size == 3 * (32 + 132) // 4


def test_what_leaves_looks_like_noise_and_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal gradients in every sync give unrelated masked ones; plain ones would be equal."""
    sent: dict[str, list[np.ndarray]] = {}
    push = in_process.LocalSession.push

    def spying(self: Any, site: str, group: str, index: int, values: Any, examples: int) -> None:
        if group != KEYS:
            sent.setdefault(site, []).append(values.view(np.uint32).copy())
        push(self, site, group, index, values, examples)

    monkeypatch.setattr(in_process.LocalSession, "push", spying)
    monkeypatch.setattr("tests.test_masked_gradients.gradient", lambda *_: np.zeros(SIZE, "f4"))
    found, _ = played(LocalHost())
    assert not np.any(found[0])
    values = np.concatenate([v for each in sent.values() for v in each])
    assert len(set(values.tolist())) == len(values) == 3 * SYNCS * SIZE
    assert 0.4 < (values > 2**31).mean() < 0.6
    total = np.add.reduce([sent[site][0] for site in SITES], dtype=np.uint32)
    assert not total.any()


def test_a_key_that_somebody_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    push = in_process.LocalSession.push

    def twice(self: Any, site: str, group: str, index: int, values: Any, examples: int) -> None:
        if site == "bert":  # who adds something in anna's place
            values = values.copy()
            values.view(np.uint32)[0] += 1
        push(self, site, group, index, values, examples)

    monkeypatch.setattr(in_process.LocalSession, "push", twice)
    found, _ = played(LocalHost())
    assert isinstance(found[0], SecureError) and "Somebody changed" in str(found[0])


def test_a_site_that_was_restarted_in_mid_session_says_so() -> None:
    class Begun:
        def sent(self, group: str) -> int:
            return 1

    begun: Any = Begun()
    with pytest.raises(SecureError, match="restarted while gradients were summed"):
        tell(begun, agreement([GROUP]), bytes(164))


def test_masks_that_do_not_cancel_are_noticed() -> None:
    class Noise:
        def receive(self, group: str) -> np.ndarray:
            return np.full(SIZE, 2**31 - 1, np.uint32).view(np.float32)

    noise: Any = Noise()
    with pytest.raises(ExchangeError, match="did not cancel"):
        MaskedGroup(noise, {}, GradientPoint(3, 0, 2)).receive("gradient")


# ---- whole rounds --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fdann", pytest.param("fwdgrl", marks=pytest.mark.slow)])
def test_a_run_gives_the_plain_model(domains: list[Node], tmp_path: Path, method: str) -> None:
    models = {}
    for masked in (False, True):
        folder = tmp_path / str(masked)
        more = {"exchange.masked": masked, "exchange.clip": 10.0}
        models[masked] = load_file(run(domains, folder, method, **more)["model"])
    assert_close(models[True], models[False], 1e-4)


def test_a_stranger_in_the_group_is_refused(domains: list[Node], tmp_path: Path) -> None:
    nodes, peers = keyed(domains, tmp_path), tmp_path / "peers"
    lines = peers.read_text().splitlines(keepends=True)
    peers.write_text("".join(line for line in lines if " bert" not in line))
    with pytest.raises(QuorumError):
        run(nodes, tmp_path, "fdann", **{"exchange.masked": True, "exchange.clip": 10.0})


def test_the_policy_demands_masks_and_bounds_changes(domains: list[Node], tmp_path: Path) -> None:
    for text, masked, fails in (("demand = true", False, True), ("changes = 0", True, False)):
        target = [*domains[:-1], *ruled(domains[-1:], f"[secure]\n{text}", tmp_path)]
        more = {"exchange.masked": masked, "exchange.clip": 10.0, "run.name": text[:4]}
        if fails:
            with pytest.raises(QuorumError):
                run(target, tmp_path, "fdann", **more)
        else:
            assert run(target, tmp_path, "fdann", **more)["rounds"]


def refusals(
    nodes: list[Node], groups: dict[str, tuple[str, ...]], rule: str, folder: Path
) -> dict[str, int]:
    """One round of f-DANN in groups that the server chose -> the errors by site."""
    settings = {"exchange__masked": True, "exchange__clip": 10.0, "fdann__pairs": True}
    folder.mkdir()
    sites = ruled(keyed(nodes, folder), f"[secure]\n{rule}", folder)
    made = Bench(sites, "fdann", **settings)
    strategy: Any = made.strategy
    by_name = {node.name: node for node in strategy.roster.nodes}
    strategy.groups = lambda _: {k: [by_name[n] for n in of] for k, of in groups.items()}
    with suppress(QuorumError, ExchangeError):
        made.round()
    return {c.site: c.error for c in made.grid.crossed if c.error}


@pytest.mark.parametrize("rule", ["least = 3", "pairs = true"])
def test_no_site_is_a_group_by_itself(domains: list[Node], tmp_path: Path, rule: str) -> None:
    """Such a group has no pair, so its gradients have no mask."""
    alone = {"anna": ("town",)}
    assert refusals(domains, alone, rule, tmp_path / "sites") == {"town": Code.POLICY}


def test_two_sites_sum_gradients_only_where_the_policy_says_so(
    domains: list[Node], tmp_path: Path
) -> None:
    pairs = {name: (name, "town") for name in ("anna", "bert", "carl")}
    refused = refusals(domains, pairs, "least = 3", tmp_path / "without")
    assert refused.keys() >= pairs.keys() and Code.POLICY in refused.values()
    assert not refusals(domains, pairs, "pairs = true", tmp_path / "with")


def agree(member: Remembered, *groups: str, kind: Any = "gradients") -> bool:
    """Whether a site adds to groups, each given as the first letters of its members."""
    try:
        member.add(kind, [[*group] for group in groups])
    except PolicyError:
        return False
    return True


def test_a_group_is_its_members_whatever_its_name_or_session(tmp_path: Path) -> None:
    me = Remembered("m", tmp_path, changes=0)
    assert agree(me, "abm") and agree(me, "bma")
    assert not agree(me, "am")
    assert not agree(me, "abcm")
    again = Remembered("m", tmp_path, changes=0)  # the site restarts
    assert not agree(again, "am") and agree(again, "abm")
    fresh = Remembered("m", None, changes=0)
    assert not agree(fresh, "abm", "am")  # in one session, of which nothing is noted
    assert agree(fresh, "am") and not agree(fresh, "abm")


def test_groups_that_share_nobody_else_tell_nothing_of_a_site() -> None:
    """Every combination of their sums holds all the others of one of them."""
    me = Remembered("m", None, changes=0)
    assert agree(me, "am", "bm", "cdm") and agree(me, "bm") and agree(me, "em")
    assert not agree(me, "adm")
    assert agree(me, "abm", kind="models") and not agree(me, "am", kind="models")


def test_going_back_to_an_earlier_group_is_a_change_as_well() -> None:
    me = Remembered("m", None, changes=3)
    assert [agree(me, g) for g in ("abm", "am", "am", "abm", "am", "am", "abm")] == 6 * [True] + [
        False
    ]


def test_what_was_added_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.site.remembered.MOST_SUMS", 3)
    me = Remembered("m", tmp_path, changes=0)
    assert [agree(me, "abm") for _ in range(4)] == [True, True, True, False]
    (tmp_path / "sums.db").write_bytes(b"no database at all")
    with pytest.raises(DataError, match="cannot be read"):
        agree(me, "abm")


@pytest.mark.nightly("fedda/exchange", "fedda/secure")
@pytest.mark.parametrize("method", ["fdan", "mdan", "fada", "dils", "fruda"])
def test_every_method_that_sums_gradients_can_mask_them(
    domains: list[Node], runs: dict[str, str], method: str
) -> None:
    accuracy = {}
    for masked in (False, True):
        flat = settings_of(method) | runs | {"exchange.masked": masked, "run.name": str(masked)}
        done = simulate(RunConfig.parse(flat), domains, Journal(), "process")
        accuracy[masked] = done["final_accuracy"]
    assert accuracy[True] == pytest.approx(accuracy[False], abs=0.05)


@pytest.mark.nightly("fedda/exchange", "fedda/secure")
def test_a_false_mean_of_a_critic_is_found_behind_masks_too(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of two the target knows the other's gradient."""
    client: Any = load_half("clients", "fruda").Collaborator
    real = client.means

    def lie(self: Any, *about: Any) -> tuple[float, float]:
        first, second = real(self, *about)
        return (first - 9, second - 9) if self.site.name == "bert" else (first, second)

    monkeypatch.setattr(client, "means", lie)
    flat = settings_of("fruda") | runs | {"exchange.masked": True, "fruda.measure.steps": 20}
    done = simulate(RunConfig.parse(flat), domains, Journal(), "process")
    (training,) = done["trainings"]["fruda"]
    names = [each["name"] for each in training["selection"]["candidates"]]
    assert names == ["anna", "carl"]
