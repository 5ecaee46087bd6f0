"""A site's policy: what it refuses before any work, its budgets, and where the site dials."""

import datetime as dt
import errno
import os
import socket
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors import SafetensorError
from typer.testing import CliRunner

from clients import app
from clients.node.failures import RunOver, Unreachable
from clients.node.fleet import Fleet
from clients.policy import describe
from clients.policy.budget import Spent, UsedBudget
from clients.policy.gate import Gate
from clients.policy.rules import MOST_CLASSES, MOST_PARAMETERS, Budget, Policy, Times
from clients.site import state
from clients.site.memory import Site, resident
from clients.site.request import Request
from fedda import models, records, wire
from fedda.algorithms import fedavg
from fedda.cli.client import app as client_command
from fedda.config import ModelConfig
from fedda.errors import (
    BudgetError,
    Code,
    ConfigError,
    DataError,
    DiskError,
    PolicyError,
    QuorumError,
    code_of,
    public,
)
from fedda.exchange import Group, Invitation
from fedda.methods import Hop, Phase
from fedda.settings import Task
from fedda.wire import Part, Rule
from fedda.wire.packing import Kind
from tests.command_lines import call
from tests.fuzzing import peak
from tests.local_grid import Bench, Node, make_domains
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("fresh_sites")

Hops = Mapping[str, Hop]


def policy(text: str, folder: Path) -> Policy:
    path = folder / "policy.toml"
    path.write_text(text)
    return Policy.read(path)


def obeying(nodes: list[Node], text: str, folder: Path) -> list[Node]:
    """Give every site the same policy, with budgets and an audit log in folders of its own."""
    rules = policy(text, folder).model_dump_json(by_alias=True)
    return [
        {**n, "policy": rules, "state-dir": str(folder / str(n["name"]))}
        | {"audited": True, "notes": False}
        for n in nodes
    ]


def a_bench(nodes: list[Node], method: str, **settings: Any) -> Bench:
    """Make a bench whose requests do not expire on a busy machine."""
    return Bench(nodes, method, **{"wait__train": PATIENCE, **settings})


def codes(bench: Bench) -> set[Code | None]:
    """Run the requests of one round -> the codes of the replies; None for an answer."""
    replies = [bench.call(request) for request in bench.begin()]
    return {Code(r.error.code) if r.has_error() else None for r in replies}


def untouched(node: Node) -> bool:
    """Whether a site has neither read its data nor built a model."""
    site = resident(tuple(sorted(node.items())))
    return not site._sets and not site._tests and not site._workspaces


def test_the_fresh_file_can_be_read_and_names_every_key(tmp_path: Path) -> None:
    fresh = policy(describe.FRESH, tmp_path)
    for name, section in fresh:
        keys = {key for key, value in section.model_dump(by_alias=True).items()}
        block = describe.FRESH.split(f"[{name}]")[1].split("\n[")[0]
        lines = [line.removeprefix("# ") for line in block.splitlines()]
        assert keys == {line.split(" = ")[0] for line in lines if " = " in line}, name
    assert "none" not in " ".join(describe.words(fresh))
    # It lets nothing leave that tells single examples.
    kept = {kind for kind, may in fresh.leaving.model_dump().items() if not may}
    assert kept == {"taught", "atoms", "statistics", "gradients", "look"}
    for each in (fresh, Policy()):
        assert Policy.parse(each.model_dump_json(by_alias=True)) == each
    assert policy("[allow]", tmp_path) == Policy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("methodes = 1", "'methodes', which is unknown, so what it forbids would not hold"),
        ("[budget]\nround = 3", "'budget.round', which is unknown"),
        ("[budget]\nrounds = -1", "budget.rounds is -1"),
        ("[budget]\ntests = inf", "budget.tests is inf"),
        ('[allow]\nmethods = "kd3a"', "allow.methods is 'kd3a'"),
        ("[limits]\nclasses = 20000", "limits.classes is 20000"),
        ('[times]\nhours = ["monday"]', "not like 'mon-fri 20:00-06:00'"),
        ("[allow", "is none in TOML"),
        ("# after a disk was full\n", "it is empty, and would allow nearly all"),
    ],
)
def test_a_file_that_does_not_hold_is_refused_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(text, tmp_path)
    assert said in str(caught.value)
    assert "policy.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_commands_write_check_and_show_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    call("policy", "init", file)
    assert "exists already" in call("policy", "init", file, code=1).output
    assert "1,000 models to test" in call("policy", "check", file).output
    budget = Policy.read(file).budget
    Spent(tmp_path, budget).request("a training", tests=1)
    assert "models to test" in call("policy", "show", file, "--state-dir", tmp_path).output
    file.write_text("[leaving]\nmodels = 3")
    assert call("policy", "check", file, code=1).output.startswith("error: ")
    call("policy", "check", tmp_path / "none.toml", code=1)


@pytest.mark.parametrize(
    ("hours", "when", "holds"),
    [
        ([], "2026-11-22 03:00", True),
        (["mon-fri 08:00-18:00"], "2026-11-23 08:00", True),  # a Monday
        (["mon-fri 08:00-18:00"], "2026-11-23 18:00", False),
        (["mon-fri 08:00-18:00"], "2026-11-22 12:00", False),
        (["fri 20:00-06:00"], "2026-11-28 05:59", True),  # the Saturday after
        (["fri 20:00-06:00"], "2026-11-28 06:00", False),
        (["fri 20:00-06:00"], "2026-11-27 05:59", False),
        (["sat-mon 00:00-24:00"], "2026-11-22 23:59", True),
        (["sat-mon 00:00-24:00"], "2026-11-24 00:00", False),
        (["tue 09:00-10:00", "wed 09:00-10:00"], "2026-11-25 09:30", True),
    ],
)
def test_hours_are_local_and_may_pass_midnight(hours: list[str], when: str, holds: bool) -> None:
    times = Times(hours=tuple(hours))
    assert times.hold(dt.datetime.fromisoformat(when)) is holds


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ('[allow]\nmethods = ["kd3a", "dils"]', "fedavg"),
        ("[allow]\nmethods = []", "fedavg"),
        ('[allow]\nnetworks = ["resnet*"]', "fedavg"),
        ('[allow]\nnorms = ["group"]', "fedavg"),
        ('[allow]\nphases = ["adapt"]', "fedavg"),
        ("[limits]\nclasses = 3", "fedavg"),
        ("[limits]\nimage-side = 7", "fedavg"),
        ("[limits]\nparameters = 1000", "fedavg"),
        ("[leaving]\nmodels = false", "fedavg"),
        ("[leaving]\natoms = false", "feddadil"),
        ("[leaving]\ngradients = false", "fdann"),
    ],
)
def test_what_is_not_allowed_is_refused_before_data_are_read(
    domains: list[Node], tmp_path: Path, text: str, method: str
) -> None:
    nodes = obeying(domains, text, tmp_path)
    rounds = {"rounds": 2} | ({"feddadil__encoder_share": 0.0} if method == "feddadil" else {})
    bench = a_bench(nodes, method, **rounds)
    assert codes(bench) == {Code.POLICY}
    assert all(untouched(node) for node in nodes)
    assert all(Spent(tmp_path / str(n["name"]), Policy().budget).used().rounds == 0 for n in nodes)


def test_what_is_allowed_is_answered(domains: list[Node], tmp_path: Path) -> None:
    text = describe.FRESH.replace("min-images = 64", "min-images = 2")
    nodes = obeying(domains, text.replace('"digit-cnn"', '"mlp"'), tmp_path)
    assert codes(a_bench(nodes, "fedavg")) == {None}


def test_what_made_teachers_could_choose_leaves_no_fresh_site(
    domains: list[Node], tmp_path: Path
) -> None:
    """KD3A's target learns what the server's teachers say, unless sources sealed them."""

    def ask(text: str, relay: str) -> None:
        task = a_bench(domains, "kd3a", kd3a__relay=relay).task
        heading = {"phase": "train", "hop": "distil", "part": "target", "round": 1}
        Gate(policy(text, tmp_path)).admit(Request.make(task.flat(), heading, {}))

    fresh = describe.FRESH.replace(describe.IMAGES, '["*"]')
    with pytest.raises(PolicyError, match=r"leaving\.taught.* --peers"):
        ask(fresh, "open")
    ask(fresh, "sealed")
    ask(fresh.replace("taught = false", "taught = true"), "open")
    ask("[allow]", "open")


TO_MODEL = Rule(wire.MODEL)
HEARS: Hop = {"target": Part(Rule({"expert": Kind.MODEL}), Rule(numbers=frozenset({wire.STEPS})))}
TAUGHT: dict[str, Hops] = {
    "other names": {"learn": {"target": Part(Rule({"expert/*": Kind.MODEL}), TO_MODEL)}},
    "one that may come": {"learn": {"target": Part(Rule(optional={"head": Kind.MODEL}), TO_MODEL)}},
    "in another hop": {"hear": HEARS, "learn": {"target": Part(TO_MODEL, TO_MODEL)}},
    "means as labels": {"learn": {"target": Part(Rule({"means": Kind.STATISTICS}), TO_MODEL)}},
    "atoms": {"learn": {"target": Part(Rule({"atoms": Kind.ATOMS}), Rule(optional=wire.MODEL))}},
    "called so alone": {"learn": {"target": Part(Rule({"discriminator": Kind.MODEL}), TO_MODEL)}},
}
COPIES = Rule(wire.MODEL, optional={"discriminator/*": Kind.MODEL})
SUMMED: Hop = {"target": Part(COPIES, Rule(wire.MODEL), frozenset({"gradient/*"}))}
JUDGED: Hop = {"target": Part(Rule({"candidate/*": Kind.MODEL}), Rule(), judges=True)}
WITNESS = Rule(wire.MODEL, optional={"witness": Kind.GRADIENT})
FREE: dict[str, Hops] = {
    "the last sum": {"learn": {"target": Part(WITNESS, WITNESS, frozenset({"witness"}))}},
    "the run's own model": {"learn": {"target": Part(TO_MODEL, TO_MODEL)}},
    "its own copies of discriminators": {"learn": SUMMED},
    "judged only": {"hear": JUDGED, "learn": {"target": Part(TO_MODEL, TO_MODEL)}},
    "which stays": {"learn": HEARS},
}


@pytest.mark.parametrize("what", [*TAUGHT, *FREE])
def test_what_teaches_a_target_is_known_by_the_contract_and_not_by_its_name(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    phase = Phase("train", {"train": fedavg.TRAIN, **(TAUGHT | FREE)[what]})
    monkeypatch.setattr(fedavg, "METHOD", replace(fedavg.METHOD, phases=(phase,)))
    task = a_bench(domains, "fedavg").task
    heading = {"phase": "train", "hop": "learn", "part": "target", "round": 1}
    text = describe.FRESH.replace("gradients = false", "gradients = true")
    rules = policy(text.replace(describe.IMAGES, '["*"]'), tmp_path)
    request = Request.make(task.flat(), heading, {})
    if what in FREE:
        Gate(rules).admit(request)
        return
    with pytest.raises(PolicyError, match=r"leaving\.taught.* fedavg has no seal"):
        Gate(rules).admit(request)
    Gate(policy("[allow]", tmp_path)).admit(request)


def test_a_site_chooses_which_normalisation_it_takes(domains: list[Node], tmp_path: Path) -> None:
    """With BatchNorm, moments of its images leave, of a target's, too."""
    rules = policy('[allow]\nnorms = ["group"]', tmp_path)
    with pytest.raises(PolicyError) as caught:
        Gate(rules).admit_frozen(a_bench(domains, "fedavg").task)
    assert "not allow the norm 'batch': it allows group (allow.norms)." in str(caught.value)
    nodes = obeying(domains, '[allow]\nnorms = ["group"]', tmp_path)
    assert codes(a_bench(nodes, "fedavg", model__norm="group")) == {None}
    plain, grouped = (" ".join(describe.words(each)) for each in (Policy(), rules))
    told = "nearly tell how frequent each class is"
    assert told in plain and told not in grouped


def test_numbers_of_tests_stay_if_the_policy_says_so(domains: list[Node], tmp_path: Path) -> None:
    nodes = obeying(domains, "[leaving]\ntests = false", tmp_path)
    bench = a_bench(nodes, "fedavg")
    bench.begin()
    sent = bench.strategy.packed(bench.model)
    (request,) = bench.strategy.configure_evaluate(1, sent, None, bench.grid)  # type: ignore[arg-type]
    reply = bench.call(request)
    assert Code(reply.error.code) is Code.POLICY
    assert reply.error.reason == public(Code.POLICY) == Code.POLICY.public
    assert untouched(nodes[-1])


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("[allow]", True),
        ("[leaving]\nclasses = false", False),
        ("[protect]\ntest-noise = 0.1", False),
    ],
)
def test_answers_by_class_leave_with_the_last_test_if_they_may(
    domains: list[Node], tmp_path: Path, policy: str, told: bool
) -> None:
    nodes = obeying(domains, policy, tmp_path)
    bench = a_bench(nodes, "fedavg", rounds=2)
    bench.begin()
    sent = bench.strategy.packed(bench.model)
    found = []
    for round_ in (1, 2):
        (request,) = bench.strategy.configure_evaluate(round_, sent, None, bench.grid)  # type: ignore[arg-type]
        reply = bench.call(request)
        found.append("answers" in dict(reply.content["metrics"]))
        assert bench.strategy.aggregate_evaluate(round_, [reply]) is not None
    assert found == [False, told]


def test_at_other_hours_nothing_is_answered_not_even_what_a_site_offers(
    domains: list[Node], tmp_path: Path
) -> None:
    day = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[(dt.date.today().weekday() + 3) % 7]
    node = obeying(domains, f'[times]\nhours = ["{day} 10:00-11:00"]', tmp_path)[0]
    bench = a_bench(domains, "fedavg")
    bench.grid.app = type(bench.grid)([node]).app
    bench.grid.contexts[1].node_config["partition-id"] = 0
    asked = Message(records.write(), 1, "query", ttl=60)
    bench.grid.push_messages([asked])
    assert Code(bench.call(asked).error.code) is Code.POLICY


def test_the_strictest_of_run_command_line_and_policy_holds(
    domains: list[Node], tmp_path: Path
) -> None:
    text = "[protect]\nmin-images = 20\nmin-examples = 30\nclip = 2.0\nnoise = 0.5\n"
    text += "test-noise = 0.1\n[keep]\nnotes = false"
    (node, *_) = obeying(domains, text, tmp_path)
    site = Site(node)
    assert (site.min_images, site.min_examples, site.clip) == (20, 30, 2.0)
    assert (site.noise, site.test_noise, site.notes) == (0.5, 0.1, False)
    site = Site(node | {"min-images": 24, "min-examples": 300, "noise": 0.7})
    assert (site.min_images, site.min_examples, site.noise) == (24, 300, 0.7)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((1, 28, 28), ModelConfig(name="digit-cnn")),
        ((3, 32, 32), ModelConfig(name="lenet")),
        ((30,), ModelConfig(name="identity")),
        ((1, 8, 8), ModelConfig(name="mlp", hidden="40,20")),
        ((1, 64, 64), ModelConfig(name="resnet18")),
    ],
)
def test_a_model_without_values_has_the_layout_of_a_real_one(
    shape: tuple[int, ...], config: ModelConfig
) -> None:
    made, outline = (models.blank(config, shape, 7, None, d).state_dict() for d in ("cpu", "meta"))
    assert list(made) == list(outline)
    assert all(made[n].shape == outline[n].shape for n in made)
    assert all(made[n].dtype == outline[n].dtype for n in made)
    assert all(tensor.is_meta for tensor in outline.values())


def asked(bench: Bench, **settings: Any) -> Request:
    """Return the first request of a round, with other settings of its task."""
    message = bench.begin()[0]
    _, tables = records.read(message.content)
    return Request.make({**tables["task"], **settings}, tables["step"], {})


@pytest.mark.parametrize(
    "settings",
    [
        {"class-names": "\n".join(map(str, range(MOST_CLASSES + 1)))},
        {"class-names": "a\n" + "b" * 2_000_000},
        {"class-names": "\n".join(map(str, range(MOST_CLASSES))), "shape": "3,4096,4096"},
        {"shape": "1,4097,16"},
        {"shape": "9,4000,4000"},
        {"model.hidden": "100000,100000"},
        {"model.name": "lenet", "model.hidden": "", "shape": "1,4096,4096"},
    ],
)
def test_a_request_for_more_than_a_site_builds_is_refused(
    domains: list[Node], settings: dict[str, Any]
) -> None:
    site, request = Site(domains[0]), asked(a_bench(domains, "fedavg"), **settings)
    with pytest.raises(PolicyError):
        site.gate.admit(request)
    site.gate.admit(asked(a_bench(domains, "fedavg")))


def test_what_a_method_adds_counts_with_the_model(domains: list[Node]) -> None:
    site, bench = Site(domains[0]), a_bench(domains, "fdann")
    site.gate.admit(asked(bench))
    with pytest.raises(PolicyError, match="fdann adds"):
        site.gate.admit(asked(bench, **{"options.discriminator.sizes": "99999,99999"}))


def test_a_request_that_names_100_000_classes_takes_no_memory(domains: list[Node]) -> None:
    _, tables = records.read(a_bench(domains, "fedavg").begin()[0].content)
    task = {"model.name": "digit-cnn", "model.hidden": "", "shape": "1,28,28"}
    task["class-names"] = "\n".join(f"class {i}" for i in range(100_000))
    content = records.write(task={**tables["task"], **task}, step=tables["step"])
    request = Message(content, 1, "train", ttl=600)
    with peak(200):  # the model alone would take 2.5 GB
        reply = app.guarded(app.train, request, domains[0])
    assert reply.error.code == Code.POLICY


def test_a_budget_is_booked_whole_or_not_at_all_and_survives_a_restart(tmp_path: Path) -> None:
    text = "[budget]\nrounds = 2\ntests = 1\ntrainings = 2\nmegabytes = 0.001"
    budget = policy(text, tmp_path).budget
    spent = Spent(tmp_path, budget)
    assert spent.used() == UsedBudget()
    spent.request("a", rounds=1)
    spent.request("a", tests=1, size=400)
    with pytest.raises(BudgetError, match="1 models to test is spent"):
        Spent(tmp_path, budget).request("a", tests=1)
    Spent(tmp_path, budget).request("b", rounds=1)  # on the disk before any work, as after a kill
    assert Spent(tmp_path, budget).used().rounds == 2
    with pytest.raises(BudgetError, match="2 training requests is spent"):
        spent.request("b", rounds=1)
    more = budget.model_copy(update={"rounds": 9})
    with pytest.raises(BudgetError, match="2 different trainings"):
        Spent(tmp_path, more).request("c", rounds=1)
    spent.leaving(600)
    with pytest.raises(BudgetError, match=r"0\.001 MB leave this site in all"):
        spent.leaving(1)
    assert Spent(tmp_path, budget).used() == UsedBudget(rounds=2, tests=1, trainings=2, bytes=1000)
    spent.path.unlink()
    for booked in (spent.used, lambda: spent.leaving(1), lambda: spent.request("a", looks=1)):
        with pytest.raises(DataError, match=r"budget\.db.* is gone; .* Restore it"):
            booked()
    assert Spent(tmp_path, budget).used() == UsedBudget(), "a new start begins anew"


@pytest.mark.parametrize(
    ("text", "answered"),
    [
        ("[budget]\ntests = 4", True),
        ("[budget]\ntests = 3", False),
        ("[leaving]\ntests = false", False),
    ],
)
def test_each_model_to_compare_counts_as_a_test(
    domains: list[Node], tmp_path: Path, text: str, answered: bool
) -> None:
    """FADA's target compares a model of each of three sources with one without any."""
    nodes = obeying(domains, text, tmp_path)
    bench = a_bench(nodes, "fada", fada__parts="attention", fada__weighting="attention")
    if not answered:
        with pytest.raises(QuorumError, match="town"):
            bench.round()
    else:
        bench.round()
    used = Spent(tmp_path / "town", Policy().budget).used()
    assert (used.tests, used.rounds) == ((4, 1) if answered else (0, 0))


def test_a_damaged_database_answers_nothing(tmp_path: Path) -> None:
    spent = Spent(tmp_path, Policy().budget)
    spent.path.write_bytes(b"this is no database, and it is longer than a header of one" * 20)
    with pytest.raises(DataError, match="move it away to begin anew"):
        spent.request("a", rounds=1)


def test_a_spent_budget_refuses_before_the_work(domains: list[Node], tmp_path: Path) -> None:
    bench = a_bench(obeying(domains, "[budget]\nrounds = 1", tmp_path), "fedavg")
    assert codes(bench) == {None}
    assert codes(bench) == {Code.BUDGET}
    assert public(Code.BUDGET) == Code.BUDGET.public


def test_bytes_are_booked_before_a_reply_leaves(domains: list[Node], tmp_path: Path) -> None:
    bench = a_bench(obeying(domains, "[budget]\nmegabytes = 0.002", tmp_path), "fedavg")
    assert codes(bench) == {Code.BUDGET}
    used = Spent(tmp_path / "anna", Policy().budget).used()
    assert (used.rounds, used.bytes < 2000) == (1, True)


def test_every_setting_makes_another_training(domains: list[Node], tmp_path: Path) -> None:
    nodes = obeying(domains, "[budget]\ntrainings = 2", tmp_path)
    assert codes(a_bench(nodes, "fedavg")) == {None}
    assert codes(a_bench(nodes, "fedavg", train__lr=0.01)) == {None}
    assert codes(a_bench(nodes, "fedavg", train__lr=0.02)) == {Code.BUDGET}
    assert codes(a_bench(nodes, "fedavg")) == {None}


class Redirecting(BaseHTTPRequestHandler):
    """Answers every request with the address of another machine."""

    elsewhere = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(307)
        self.send_header("Location", f"http://127.0.0.1:{self.elsewhere}/v1/fleet/x")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_client_follows_no_answer_to_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.setblocking(False)
        monkeypatch.setattr(Redirecting, "elsewhere", nobody.getsockname()[1])
        with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            address = f"127.0.0.1:{server.server_address[1]}"
            with pytest.raises((Unreachable, RunOver)):
                Fleet(address, insecure=True, root_certificates=None, key=None)
            server.shutdown()
            thread.join()
        with pytest.raises(BlockingIOError):
            nobody.accept()


def test_more_values_than_a_site_takes_are_not_summed(domains: list[Node]) -> None:
    groups = tuple(Group(f"gradient/{i}", MOST_PARAMETERS, 1, ("a",)) for i in range(3))
    asked = Invitation("", "", "0" * 64, "a", groups, 5.0)
    with pytest.raises(PolicyError, match="3 groups of gradients"):
        Site(domains[0]).gate._check_exchange(asked)


def a_file(path: Path, size: int, age: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    return path


def test_the_oldest_files_of_other_trainings_go_first_and_nothing_else(
    domains: list[Node], tmp_path: Path
) -> None:
    site = Site(domains[0] | {"state-dir": str(tmp_path)})
    task = asked(a_bench(domains, "fedavg")).task
    folder = tmp_path / "anna"
    mine = [
        a_file(folder / f"{task.training}.1.method.safetensors", 300, 900),
        a_file(folder / "notes" / task.training / "first.npz", 300, 900),
    ]
    others = [
        a_file(folder / "old.fedavg-0.1.method.safetensors", 400, 60),
        a_file(folder / "old.dils-0.model.safetensors", 400, 50),
        a_file(folder / "models" / "old.feddadil-0" / "ensemble.safetensors", 400, 40),
        a_file(folder / "notes" / "old.fedavg-0" / "last.npz", 400, 30),
    ]
    own = [a_file(folder / "blocks.json", 5000, 999), a_file(tmp_path / "audit.jsonl", 5000, 999)]
    kept = ("backup.safetensors", "notes/old.fedavg-0/what-we-saw.txt", "notes/backup/last.npz")
    kept += ("our.resnet-18.safetensors", "our.plan-2.json", "models/old.feddadil-0/about.json")
    kept += ("notes/old.fedavg-0/ours.safetensors",)
    own += [a_file(folder / name, 5000, 999) for name in kept]
    state.make_room(site, task, 0.0015)  # room for two of the others
    assert [path.exists() for path in others] == [False, False, True, True]
    assert all(path.exists() for path in mine + own)
    with pytest.raises(BudgetError, match=r"keep\.megabytes"):
        state.make_room(site, task, 0.0005)
    assert all(path.exists() for path in mine + own)


def test_adapted_models_are_pruned_the_newest_stay(domains: list[Node], tmp_path: Path) -> None:
    site = Site(domains[0] | {"state-dir": str(tmp_path)})
    task: Task = asked(a_bench(domains, "fedavg")).task
    folder = tmp_path / "anna"
    own = a_file(folder / f"{task.training}.model.safetensors", 10, 9999)
    made = [a_file(folder / f"r{i}.dils-0.model.safetensors", 10, i) for i in range(20)]
    kept = [a_file(folder / f"r{i}.dils-0.refined.safetensors", 10, i) for i in range(20)]
    state.make_room(site, task)
    assert own.exists()
    last = [path.exists() for pair in zip(made, kept, strict=True) for path in pair]
    assert last.count(True) == 31 and [made[i].exists() for i in (0, 14, 16)] == [1, 1, 0]


def starting(data: Path, *more: object) -> Any:
    """A client that nobody answers."""
    words = ["--role", "source", "--data", data, "--insecure", "--superlink", "127.0.0.1:9"]
    words += ["--state-dir", data.parent / "state", *more]
    return CliRunner().invoke(client_command, [str(word) for word in words])


def test_a_client_whose_data_are_not_finite_says_that_it_starts_and_does_not_join(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedda.client")
    x = np.zeros((40, 5), np.float32)
    x[7, 2] = np.inf
    np.savez(tmp_path / "site.npz", x_train=x, y_train=np.arange(40) % 2)
    done = starting(tmp_path / "site.npz")
    assert done.exit_code == 1
    assert done.output.count("error: ") == 1 and "finite" in done.output
    assert "connecting" not in done.output and caplog.messages == ["starting: site, a source"]


def test_a_client_with_a_wrong_policy_does_not_join(tmp_path: Path) -> None:
    (node, *_) = make_domains(tmp_path)
    (tmp_path / "policy.toml").write_text("[budget]\nround = 3")
    done = starting(Path(node["data"]), "--policy", tmp_path / "policy.toml")
    assert done.exit_code == 1 and "budget.round" in done.output


def test_a_full_disk_asks_for_room_and_for_no_new_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = Spent(tmp_path, Budget(rounds=5))
    spent.request("first", rounds=1)
    with sqlite3.connect(spent.path) as base:
        (pages,) = base.execute("PRAGMA page_count").fetchone()
    connect = sqlite3.connect

    def full(*words: Any, **more: Any) -> sqlite3.Connection:
        base = connect(*words, **more)
        base.execute(f"PRAGMA max_page_count = {pages}")
        return base

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(DiskError, match="make room there, and leave this file") as caught:
        spent.request("x" * 5000, rounds=1)
    assert code_of(caught.value) is code_of(OSError(errno.ENOSPC, "full")) is Code.DISK
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert code_of(SafetensorError(said)) is Code.DISK  # a model that a site keeps
    monkeypatch.undo()
    assert spent.used().rounds == 1
