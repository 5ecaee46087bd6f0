"""Several studies on one server: each site consents per study, and budgets add up over them.

The attacks are here, too: a study that is not listed, a new name for a fresh budget, a run under
another study's name, and names that are paths.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from typer.testing import CliRunner

from clients.face import Face
from clients.policy import words
from clients.policy.rules import Policy, Privacy
from clients.policy.spent import Spent
from clients.site import state
from clients.site.identity import Drawer
from clients.site.memory import Site, resident
from clients.site.plain_log import LOG
from clients.site.remembered import Remembered
from clients.site.request import flat
from clients.site.summed import Summed
from fedda import records
from fedda.cli import app
from fedda.config import study_name
from fedda.errors import (
    BudgetError,
    Code,
    ConfigError,
    KeyFileError,
    PolicyError,
    QuorumError,
    RunError,
    SecureError,
    StudyError,
    public,
)
from fedda.ops import chain, keys
from fedda.ops.spawn import REGISTERED
from fedda.results.read import at_site, refined_at
from fedda.results.snapshot import RunNow, Snapshot
from fedda.secure.agree import Occasion, Own, verify
from fedda.settings import RunConfig, Task
from server import looking, run
from server.attendance import Sites
from server.journal import Journal
from server.superlink import registered
from server.superlink.registered import RegisteredKey
from tests.local_grid import FAST, Bench, Node, ScriptedGrid
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("fresh_sites")

BOTH = "[study.heart]\n[study.lungs]\n"
ODD = [
    "../up",
    "a/b",
    "a\\b",
    "Heart",
    "a b",
    "a.b",
    "a+b",
    "-a",
    "a-",
    "a" * 33,
    'a" x',
    "a\n",
    "é",
]


def policy(text: str, folder: Path) -> Policy:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text(text)
    return Policy.read(folder / "policy.toml")


def obeying(nodes: list[Node], folder: Path, text: str, **others: str) -> list[Node]:
    """Give every site a policy of the same text, or of its own, with its books and audit log."""
    return [
        {**n, "policy": policy(others.get(n["name"], text), folder).model_dump_json(by_alias=True)}
        | {"audited": True, "notes": False, "state-dir": str(folder / str(n["name"]))}
        for n in nodes
    ]


def a_bench(nodes: list[Node], study: str, method: str = "fedavg", **settings: Any) -> Bench:
    return Bench(nodes, method, **{"wait__train": PATIENCE, "run__study": study, **settings})


def codes(bench: Bench, server_round: int = 1) -> set[Code | None]:
    """Run the requests of one round -> the codes of the replies; None for an answer."""
    replies = [bench.call(request) for request in bench.begin(server_round)]
    return {Code(r.error.code) if r.has_error() else None for r in replies}


def asked(nodes: list[Node], study: str, method: str = "fedavg", **task: Any) -> list[Message]:
    """The requests of a run's first round, which each say that they are for a study.

    They are made as for sites without a policy, so that no site has seen them.
    """
    plain = [{k: v for k, v in n.items() if k not in ("policy", "audited")} for n in nodes]
    found = []
    for request in a_bench(plain, "", method).begin():
        arrays, tables = records.read(request.content)
        tables["task"] |= {"study": study} | task if study else task
        meta = request.metadata
        found.append(Message(records.write(arrays, **tables), meta.dst_node_id, "train", ttl=60))
    return found


def code_of(grid: ScriptedGrid, request: Message) -> Code | None:
    reply = grid.call(request)
    return Code(reply.error.code) if reply.has_error() else None


def entries(folder: Path, site: str) -> list[chain.Entry]:
    return chain.check(folder / site / "audit.jsonl").entries


# ---- the file ------------------------------------------------------------------------------------


def test_a_study_s_keys_stand_in_place_of_the_general_ones(tmp_path: Path) -> None:
    rules = policy(
        """
        [allow]
        methods = ["kd3a"]
        phases = ["train"]
        [budget]
        rounds = 10
        tests = 5
        [protect]
        min-images = 32
        [study.heart]
        [study.lungs.allow]
        methods = ["fedavg"]
        [study.lungs.budget]
        rounds = 3
        [study.lungs.leaving]
        look = true
        """,
        tmp_path,
    )
    heart, lungs = rules.of("heart"), rules.of("lungs")
    assert heart == rules.model_copy(update={"study": {}})
    assert (lungs.allow.methods, lungs.allow.phases) == (("fedavg",), ("train",))
    assert (lungs.budget.rounds, lungs.budget.tests) == (3, 5)
    assert lungs.leaving.look and not heart.leaving.look
    assert lungs.protect.min_images == 32
    assert Policy.parse(rules.model_dump_json(by_alias=True)) == rules


def test_without_studies_every_run_has_the_general_rules() -> None:
    assert Policy().of("") == Policy().of("any") == Policy()


@pytest.mark.parametrize("study", ["", "brain", "heart ", "HEART", "../heart", "a" * 99])
def test_once_a_study_is_listed_no_other_run_is_served(study: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="lists the studies heart, lungs") as caught:
        policy(BOTH, tmp_path).of(study)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[study.heart.budget]\nround = 3", "'study.heart.budget.round', which is unknown"),
        ("[study.heart]\nmethods = 3", "'study.heart.methods', which is unknown"),
        ("[study.heart.study.lungs]", "a study has no studies"),
        ('[study.heart.allow]\nplugins = ["x==1"]', "allow.plugins is for the whole site"),
        ("[study.heart.protect]\nmin-images = 9", "protect.min-images is for the whole site"),
        ("[study.heart.protect]\nmin-examples = 9", "min-examples is for the whole site"),
        ("[study.heart.audit]\nimages = 0.5", "study.heart.audit is for the whole site"),
        ("[study]\nheart = 3", "write [study.heart]"),
        ("study = 3", "write [study]"),
        ("[study.heart]\nallow = 3", "write [study.heart.allow]"),
        ("allow = 3\n[study.heart]", "write [allow]"),
        ("[study.heart.budget]\nrounds = -1", "study.heart.budget.rounds is -1"),
        *((f"[study.{json.dumps(name)}]", "a study's name has up to 32") for name in ["", *ODD]),
    ],
)
def test_a_study_that_does_not_hold_is_refused_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(text, tmp_path)
    assert said in str(caught.value) and "policy.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ODD)
def test_a_run_and_a_key_have_no_odd_study_either(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="up to 32"):
        study_name(name)
    with pytest.raises(ConfigError, match=r"run\.study is "):
        RunConfig.parse({"run.study": name})
    task = Task(method="fedavg").model_dump(by_alias=True)
    with pytest.raises(ConfigError, match="study"):
        Task.parse({k: v for k, v in task.items() if isinstance(v, str)} | {"study": name})
    with pytest.raises(KeyFileError, match="cannot be a study"):
        keys.add(tmp_path, "anna", studies=[name])
    assert not (tmp_path / "nodes").exists()


def test_the_policy_in_words_and_what_is_used_of_it_are_per_study(tmp_path: Path) -> None:
    rules = policy("[budget]\nrounds = 9\n[study.heart.budget]\nrounds = 4", tmp_path)
    said = [*words.words(rules)]
    assert said[0].startswith("Takes part in the studies heart; a run of another, or of none")
    assert "All studies together: 9 requests to train" in said[1]
    assert any(s.startswith("heart: In all: 4 requests to train") for s in said)
    Spent(tmp_path, rules.budget, "heart", rules.of("heart").budget).request("t", rounds=2)
    rows = [*words.left(rules, Spent(tmp_path, rules.budget))]
    assert ("requests to train", "2", "9") in rows
    assert ("heart: requests to train", "2", "4") in rows
    show = ["policy", "show", str(tmp_path / "policy.toml"), "--state-dir", str(tmp_path)]
    used = json.loads(CliRunner().invoke(app, [*show, "--json"]).stdout)["used"]
    assert (used["rounds"], used["studies"]["heart"]["rounds"]) == (2, 2)
    assert "heart: requests to" in CliRunner().invoke(app, show).output


# ---- a site's consent ----------------------------------------------------------------------------


@pytest.mark.parametrize("study", ["", "brain"])
def test_a_request_of_no_listed_study_is_refused_before_any_work(
    study: str, domains: list[Node], tmp_path: Path
) -> None:
    nodes = obeying(domains, tmp_path, BOTH)
    grid = ScriptedGrid(nodes)
    assert {code_of(grid, request) for request in asked(nodes, study)} == {Code.STUDY}
    for node in nodes[:3]:
        site, folder = resident(tuple(sorted(node.items()))), tmp_path / str(node["name"])
        assert not site._sets and not site._workspaces and site._described is None
        assert not (folder / "budget.db").exists()
        last = entries(tmp_path, str(node["name"]))[-1]
        assert (last["event"], last["code"], last.get("study", "")) == ("refused", "STUDY", study)


def test_each_study_has_its_own_rules_at_the_same_site(domains: list[Node], tmp_path: Path) -> None:
    text = '[study.heart.allow]\nmethods = ["fedavg"]\n[study.lungs.allow]\nmethods = ["fedprox"]'
    nodes = obeying(domains, tmp_path, text)
    for study, method, wanted in (
        ("heart", "fedavg", None),
        ("lungs", "fedavg", Code.POLICY),
        ("lungs", "fedprox", None),
        ("heart", "fedprox", Code.POLICY),
    ):
        assert codes(a_bench(nodes, study, method)) == {wanted}, (study, method)


def test_the_stricter_settings_of_a_study_hold_for_its_requests_alone(
    domains: list[Node], tmp_path: Path
) -> None:
    text = "[protect]\nclip = 9.0\n[study.heart.protect]\nnoise = 2.0\nclip = 1.0\n[study.lungs]"
    site = Site(obeying(domains, tmp_path, text)[0] | {"noise": 0.5})
    for study, noise, clip in (("heart", 2.0, 1.0), ("lungs", 0.5, 9.0), ("heart", 2.0, 1.0)):
        site.enter(study)
        assert (site.noise, site.clip, site.study) == (noise, clip, study)


def test_a_site_that_lists_studies_has_no_rules_before_one_is_named(
    domains: list[Node], tmp_path: Path
) -> None:
    site = Site(obeying(domains, tmp_path, BOTH)[0])
    assert not hasattr(site, "gate")
    with pytest.raises(StudyError):
        Face(site).get_properties({})
    assert Face(site).get_properties({"question.study": "heart"})["name"] == "anna"
    with pytest.raises(StudyError):  # the last request's rules are not the next one's
        Face(site).get_properties({})


def test_the_rules_hold_for_flower_s_own_client_too(domains: list[Node], tmp_path: Path) -> None:
    text = '[study.heart]\n[study.lungs.allow]\nmethods = ["fedprox"]'
    nodes = obeying(domains, tmp_path, text)

    def fit(study: str) -> None:
        arrays, tables = records.read(asked(nodes, study)[0].content)
        face.fit(*flat(arrays, tables))

    face = Face(Site(nodes[0]))
    fit("heart")
    for study, error in (("lungs", PolicyError), ("", StudyError), ("brain", StudyError)):
        with pytest.raises(error):
            fit(study)
    fit("heart")


@pytest.mark.parametrize("table", ["question", "look", "logs"])
@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "query.look", "query.logs"])
def test_no_request_names_two_studies(
    table: str, kind: str, domains: list[Node], tmp_path: Path
) -> None:
    """A second table with another study must not let the first one's rules through."""
    text = "[leaving]\nlook = true\nlogs = true\n[study.heart]\n[study.lungs.allow]\nmethods = []"
    nodes = obeying(domains, tmp_path, text)
    grid = ScriptedGrid(nodes)
    for task, other in (("heart", "lungs"), ("lungs", "heart")):
        request = asked(nodes, task)[0]
        content = request.content
        content[table] = ConfigRecord({"study": other, "run": "run"})
        message = Message(content, request.metadata.dst_node_id, kind, ttl=60)
        assert code_of(grid, message) in (Code.WIRE, Code.POLICY)


def test_a_question_names_a_study_and_no_more(domains: list[Node], tmp_path: Path) -> None:
    nodes = obeying(domains, tmp_path, BOTH)
    grid = ScriptedGrid(nodes)
    for table, wanted in (
        ({"study": "heart"}, None),
        ({"study": "heart", "more": 1}, Code.WIRE),
        ({"study": ["heart"]}, Code.STUDY),
        ({"study": b"heart"}, Code.STUDY),
        ({}, Code.STUDY),
    ):
        content = RecordDict({"question": ConfigRecord(table)})  # type: ignore[arg-type]
        assert code_of(grid, Message(content, 1, "query", ttl=60)) is wanted, table


def test_a_site_without_studies_serves_any_study_by_its_general_rules(
    domains: list[Node], tmp_path: Path
) -> None:
    nodes = obeying(domains, tmp_path, '[allow]\nmethods = ["fedavg"]\n[budget]\nrounds = 2')
    assert codes(a_bench(nodes, "heart")) == codes(a_bench(nodes, "lungs")) == {None}
    assert codes(a_bench(nodes, "brain")) == {Code.BUDGET}  # a new name is no fresh budget
    assert codes(a_bench(nodes, "heart", "fedprox")) == {Code.POLICY}


# ---- budgets -------------------------------------------------------------------------------------


def test_a_study_s_budget_is_its_own_and_all_count_together(
    domains: list[Node], tmp_path: Path
) -> None:
    text = "[budget]\nrounds = 3\n[study.heart.budget]\nrounds = 1\n[study.lungs]\n[study.brain]"
    nodes = obeying(domains, tmp_path, text)
    assert codes(a_bench(nodes, "heart")) == {None}
    assert codes(a_bench(nodes, "heart", run__name="again")) == {Code.BUDGET}
    assert codes(a_bench(nodes, "lungs")) == {None}
    resident.cache_clear()  # the sites restart
    assert codes(a_bench(nodes, "heart")) == {Code.BUDGET}
    assert codes(a_bench(nodes, "lungs", run__name="b")) == {None}
    assert codes(a_bench(nodes, "lungs", run__name="c")) == {Code.BUDGET}  # of all, 3 are spent
    assert codes(a_bench(nodes, "brain")) == {Code.BUDGET}
    for new in ("heart2", "heart-", "Heart", ""):  # a new name has none
        assert {code_of(ScriptedGrid(nodes), r) for r in asked(nodes, new)} == {Code.STUDY}
    spent = Spent(tmp_path / "anna", Policy().budget)
    assert [spent.used(s).rounds for s in ("", "heart", "lungs", "brain")] == [3, 1, 2, 0]


@pytest.mark.parametrize("which", ["rounds", "tests", "trainings", "bytes"])
@pytest.mark.parametrize("of", ["study", "all"])
def test_each_budget_is_counted_in_both_accounts_or_in_none(
    which: str, of: str, tmp_path: Path
) -> None:
    key, most = ("megabytes", 2e-6) if which == "bytes" else (which, 2)
    bound = f"[budget]\n{key} = {most}\n"
    rules = policy(
        f"{bound}{BOTH}" if of == "all" else f"{BOTH}{bound.replace('[', '[study.heart.')}",
        tmp_path,
    )

    def spent(study: str) -> Spent:
        return Spent(tmp_path, rules.budget, study, rules.of(study).budget)

    def use(study: str, training: str) -> None:
        if which == "bytes":
            spent(study).leaving(1)
        else:
            spent(study).request(training, **({which: 1} if which != "trainings" else {}))

    use("heart", "a")
    use("heart", "b")
    with pytest.raises(
        BudgetError, match="for the study heart" if of == "study" else "^(?!.*study)"
    ):
        use("heart", "c")
    assert getattr(spent("heart").used("heart"), which) == 2
    assert getattr(spent("heart").used(), which) == 2
    if of == "all":
        with pytest.raises(BudgetError):
            use("lungs", "d")
    else:
        use("lungs", "d")
        assert getattr(spent("lungs").used(), which) == 3


def test_epsilon_adds_up_over_studies_on_the_same_examples(tmp_path: Path) -> None:
    mine, total, steps = Privacy(epsilon=4.0), Privacy(epsilon=5.0), (1.0, 0.1, 10)

    def spent(study: str) -> Spent:
        return Spent(tmp_path, Policy().budget, study, Policy().budget)

    first = spent("heart").steps(steps, total, mine)
    assert spent("lungs").steps(steps, total, mine) == first  # a study is told its own
    both = spent("heart").epsilon(1e-5)
    assert first < both < 5.0 and spent("heart").epsilon(1e-5, "heart") == first
    with pytest.raises(BudgetError, match="over all runs for the study heart"):
        spent("heart").steps((1.0, 0.1, 40), Privacy(), mine)
    with pytest.raises(BudgetError, match=r"allows 5 over all runs \("):
        for study in "abcdefgh":
            spent(study).steps(steps, total, mine)
    assert both < spent("heart").epsilon(1e-5) <= 5.0


def test_an_account_of_before_any_study_goes_on_as_that_of_all(tmp_path: Path) -> None:
    before = Spent(tmp_path, Policy().budget)
    before.request("a", rounds=1)
    before.steps((1.0, 0.1, 10), Privacy())
    rules = policy("[budget]\nrounds = 1\n[study.heart]", tmp_path)
    with pytest.raises(BudgetError, match="budget of 1 training requests is spent"):
        Spent(tmp_path, rules.budget, "heart", rules.of("heart").budget).request("b", rounds=1)
    assert before.used("heart").rounds == before.epsilon(1e-5, "heart") == 0


def test_changes_of_a_sum_s_group_count_per_study_and_in_all(tmp_path: Path) -> None:
    site = Site({"role": "source", "name": "a", "data": "none"})
    rules = policy(
        "[secure]\nchanges = 2\n[study.heart.secure]\nchanges = 1\n[study.lungs]", tmp_path
    )

    def sum_in(study: str, group: str) -> None:
        summed = Summed(
            site.identity, rules.secure, rules.of(study).secure, tmp_path, Drawer(None), study
        )
        for remembered in summed._remembered:
            remembered.add("models", [[*group]])

    sum_in("heart", "abc")
    sum_in("heart", "abd")
    with pytest.raises(PolicyError, match="allows 1 for the study heart"):
        sum_in("heart", "abc")
    sum_in("lungs", "abc")  # the second change of all: b is in both groups
    with pytest.raises(PolicyError, match=r"allows 2 \(secure\.changes\)"):
        sum_in("lungs", "abd")
    assert Remembered("a", tmp_path, 9, "heart")._path == tmp_path / "sums-heart.db"


def test_a_look_is_the_same_for_every_study(domains: list[Node], tmp_path: Path) -> None:
    """Two answers about the same data, with noise of their own each, would be half as noisy."""
    text = "[study.heart.leaving]\nlook = true\n[study.lungs.leaving]\nlook = true\n[study.brain]"
    node = obeying(domains, tmp_path, text)[0]
    rng = np.random.default_rng(0)
    x = rng.normal(50, 10, (200, 3)).astype(np.float32)
    classes = np.array(["0", "1"])
    data = tmp_path / "x.npz"
    np.savez(data, x=x, y=np.arange(200) % 2, classes=classes)
    grid = ScriptedGrid([node | {"data": str(data)} | {"noise": 0.1, "reproducible": False}])

    def look(study: str) -> Message:
        content = records.write(look={"run": study, "study": study})
        return grid.call(Message(content, 1, "query.look", ttl=60))

    heart, lungs = look("heart"), look("lungs")
    assert records.digest(heart) == records.digest(lungs)
    assert look("brain").error.code == Code.POLICY
    assert look("").error.code == Code.STUDY


# ---- what stays at a site ------------------------------------------------------------------------


def test_trainings_of_the_same_name_in_two_studies_are_two(
    domains: list[Node], tmp_path: Path
) -> None:
    nodes = obeying(domains, tmp_path, BOTH)
    for study in ("heart", "lungs"):
        bench = a_bench(nodes, study, train__carry_momentum=True)
        assert codes(bench) == {None}
    names = sorted(p.name for p in (tmp_path / "anna" / "anna").glob("*.safetensors"))
    assert names == [f"{s}+run.fedavg-0.1.optimizer.safetensors" for s in ("heart", "lungs")]
    heart, lungs = (a_bench(nodes, s).task for s in ("heart", "lungs"))
    site = resident(tuple(sorted(nodes[0].items())))
    assert site.workspace(heart) is not site.workspace(lungs)
    assert heart.digest != lungs.digest


def test_a_run_cannot_name_another_study_s_trainings() -> None:
    with pytest.raises(ConfigError):  # not even a run without a study
        RunConfig.parse({"run.name": "heart+a"})


@pytest.mark.parametrize("lists", [True, False])
def test_a_study_makes_room_among_its_own_files(
    lists: bool, domains: list[Node], tmp_path: Path
) -> None:
    """No study's server deletes another's files; names of studies that nobody lists are no room."""
    site = Site(obeying(domains, tmp_path, BOTH if lists else "")[0])
    site.enter("heart")
    folder = tmp_path / "anna" / "anna"
    folder.mkdir(parents=True)
    for name in ("lungs+old.fedavg-0.1.x", "heart+old.fedavg-0.1.x", "heart+run.fedavg-0.1.x"):
        (folder / f"{name}.safetensors").write_bytes(b"x" * 400)
    state.make_room(site, a_bench(domains, "heart").task, 0.0005)
    left = {path.name.partition(".")[0] for path in folder.glob("*.safetensors")}
    assert left == {"heart+run", *(["lungs+old"] if lists else [])}


def test_a_study_is_told_no_line_of_another_s_work(domains: list[Node], tmp_path: Path) -> None:
    import logging

    text = "[leaving]\nlogs = true\n[study.heart]\n[study.lungs]"
    grid = ScriptedGrid(obeying(domains, tmp_path, text)[:1])
    logger = logging.getLogger("fedda")
    level = logger.level
    logging.getLogger().addHandler(LOG)
    logger.setLevel(logging.INFO)
    LOG._lines.clear()

    def lines(study: str) -> list[str]:
        content = records.write(logs={"run": "logs", "study": study})
        reply = grid.call(Message(content, 1, "query.logs", ttl=60))
        return str(records.read(reply.content)[1]["logs"]["text"]).splitlines()

    try:
        assert code_of(grid, Message(RecordDict(), 1, "train", ttl=60)) == Code.STUDY
        content = records.write(look={"run": "r", "study": "heart"})
        assert code_of(grid, Message(content, 1, "query.look", ttl=60)) == Code.POLICY
        heart, lungs = lines("heart"), lines("lungs")
    finally:
        LOG._lines.clear()
        logging.getLogger().removeHandler(LOG)
        logger.setLevel(level)
    refused = [line for line in heart if "PolicyError" in line]
    assert len(refused) == 1 and refused[0] not in lungs
    assert [line for line in heart if "StudyError" in line] == lungs  # of no study's work


def test_the_audit_log_names_the_study(domains: list[Node], tmp_path: Path) -> None:
    nodes = obeying(domains, tmp_path, BOTH)
    assert codes(a_bench(nodes, "heart")) == {None}
    found = [(e["event"], e.get("study")) for e in entries(tmp_path, "anna")]
    assert found == [("received", "heart"), ("answered", "heart")] * 2
    shown = CliRunner().invoke(
        app, ["policy", "log", "--state-dir", str(tmp_path / "anna")], env={"COLUMNS": "300"}
    )
    assert "heart+run" in shown.output


# ---- what binds a run to its study ---------------------------------------------------------------


def test_sites_sign_the_study_so_that_those_told_another_are_in_no_common_sum(
    tmp_path: Path,
) -> None:
    keys.add(tmp_path, "anna")
    key = keys.load_node_key(tmp_path / "nodes" / "anna")
    known = {"anna": key.public_key()}
    heart, lungs, none = (
        Occasion(Task(run="r", method="fedavg", study=study).training, 1, 1)
        for study in ("heart", "lungs", "")
    )
    own = Own(heart)
    signed = own.sign("anna", key)
    verify(heart, "anna", own.public, signed, known)
    for other in (lungs, none, replace(heart, training="heart.r.fedavg-0")):
        with pytest.raises(SecureError, match="not signed by it for this round"):
            verify(other, "anna", own.public, signed, known)


@pytest.mark.parametrize("when", ["never", "keys", "train", "both"])
def test_a_server_that_tells_sites_of_a_sum_different_studies_gets_no_model(
    when: str, domains: list[Node], tmp_path: Path
) -> None:
    """It cannot count a site's part in a sum of one study against the budgets of another."""
    for node in domains:
        keys.add(tmp_path / "hub", node["name"], node["role"])
    about = {"peers": str(tmp_path / "hub" / "peers")}
    home = tmp_path / "hub" / "nodes"
    keyed = [n | about | {"key": str(home / n["name"])} for n in domains]
    nodes = obeying(keyed, tmp_path, BOTH)

    def relabelled(request: Message, hop: str) -> Message:
        made = when in (hop, "both") and grid.nodes[request.metadata.dst_node_id]["name"] == "carl"
        if not made:
            return request
        arrays, tables = records.read(request.content)
        tables["task"]["study"] = "lungs"
        content = records.write(arrays, **tables)
        return Message(content, request.metadata.dst_node_id, "train", ttl=60)

    bench = a_bench(nodes, "heart", secure="sum")
    grid = bench.grid
    replies = [grid.call(relabelled(request, "keys")) for request in bench.begin()]
    assert not any(reply.has_error() for reply in replies)  # a key alone says nothing
    sent: list[Message] = []
    bench.strategy.mail.deliver = lambda requests, *_: sent.extend(requests) or []  # type: ignore
    with pytest.raises(QuorumError):
        bench.strategy.aggregate_train(1, replies)
    assert len(sent) == 3
    answers = [grid.call(relabelled(request, "train")) for request in sent]
    refused = {Code(a.error.code) for a in answers if a.has_error()}
    assert refused == (set() if when == "never" else {Code.SECURE})
    if when in ("keys", "both"):  # no site sends anything
        assert all(a.has_error() for a in answers)
    else:  # the others' masks have no counterpart, so what they sent cannot be read
        assert [a.has_error() for a in answers] == [False, False, when == "train"]


def test_without_a_study_nothing_that_crosses_is_other_than_before() -> None:
    task = Task(run="r", method="fedavg")
    assert "study" not in task.flat() and task.training == "r.fedavg-0"
    assert Task(run="r", method="fedavg", study="heart").flat()["study"] == "heart"


def test_a_run_is_not_resumed_as_one_of_another_study(tmp_path: Path) -> None:
    flat = {"run.dir": str(tmp_path), "run.name": "r", "run.study": "heart"}
    (tmp_path / "r").mkdir()
    run.claim(tmp_path / "r", RunConfig.parse(flat))
    (tmp_path / "r" / "results.json").write_text("{}")
    for other in ("lungs", ""):
        with pytest.raises(RunError, match=r"began with run\.study 'heart'"):
            changed = flat | {"run.study": other, "run.resume": True}
            run.claim(tmp_path / "r", RunConfig.parse(changed))
    run.claim(tmp_path / "r", RunConfig.parse(flat | {"run.resume": True}))


# ---- the server's side ---------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(REGISTERED, str(tmp_path / "registered.json"))
    yield tmp_path / "registered.json"


def registers(file: Path, grid: ScriptedGrid, **studies: list[str]) -> None:
    entries = {
        i: RegisteredKey(n["name"], "", studies.get(n["name"], [])) for i, n in grid.nodes.items()
    }
    registered.write(file, entries)


def test_a_run_asks_only_sites_whose_keys_are_for_its_study(
    domains: list[Node], file: Path
) -> None:
    grid = ScriptedGrid(domains)
    registers(file, grid, anna=["heart"], bert=["heart", "lungs"], carl=["lungs"])
    # An hour later, if it waited for sites of other studies.
    waits = {"wait.settle": 3600.0, "wait.sites": 7200.0, "run.expect": 0}

    def joined(study: str) -> list[str]:
        grid.requests.clear()
        config = RunConfig.parse(FAST | waits | {"run.study": study})
        names = [node.name for node in Sites(grid, config, Journal()).gather().nodes]
        was_asked = {grid.nodes[r.metadata.dst_node_id]["name"] for r in grid.requests}
        assert was_asked == {*names}
        return names

    assert joined("heart") == ["anna", "bert", "town"]
    assert joined("lungs") == ["bert", "carl", "town"]
    with pytest.raises(Exception, match="0 sources and 1 targets"):  # of no study: town alone
        config = RunConfig.parse(FAST | {"run.expect": 0, "wait.sites": 0.2})
        Sites(grid, config, Journal()).gather()
    assert registered.everyone("heart") == {1, 2, 4} and registered.outside("heart") == {3}


def test_a_run_does_not_wait_for_sites_that_refuse_its_study(
    domains: list[Node], tmp_path: Path, file: Path
) -> None:
    grid = ScriptedGrid(obeying(domains, tmp_path, BOTH, carl="[study.brain]"))
    registers(file, grid)
    waits = {"wait.settle": 3600.0, "wait.sites": 7200.0, "run.expect": 0}
    journal = Journal()
    sites = Sites(grid, RunConfig.parse(FAST | waits | {"run.study": "heart"}), journal)
    assert [node.name for node in sites.gather().nodes] == ["anna", "bert", "town"]
    sites._again.clear()  # as if it was time to ask again
    sites.look()
    (trouble,) = journal.troubles
    assert trouble["text"] == public(Code.STUDY) and "--study" in trouble["text"]
    config = RunConfig.parse(FAST | {"run.study": "brain", "wait.sites": 0.2, "run.expect": 0})
    with pytest.raises(QuorumError, match=r"1 sources and 0 .* 3 more take no part in the run's"):
        Sites(grid, config, Journal()).gather()


def test_a_look_and_logs_are_asked_for_a_study(
    domains: list[Node], tmp_path: Path, file: Path
) -> None:
    grid = ScriptedGrid(domains)
    registers(file, grid, anna=["heart"], bert=["heart"])
    names = {i: str(node["name"]) for i, node in grid.nodes.items()}
    flat = {"run.dir": str(tmp_path), "wait.sites": 0.2, "wait.settle": 0.0}
    for study, wanted in (("heart", {"anna", "bert", "carl", "town"}), ("", {"carl", "town"})):
        grid.requests.clear()
        config = RunConfig.parse(
            flat | {"run.look": True, "run.name": f"look{study}"} | {"run.study": study}
        )
        with pytest.raises(
            Exception, match="told what their data look like"
        ):  # nobody's policy lets
            looking.execute(config, grid, Journal(), names)
        assert {names[r.metadata.dst_node_id] for r in grid.requests} == wanted
        tables = [records.read(r.content)[1]["look"] for r in grid.requests]
        assert all(table.get("study", "") == study for table in tables)
    config = RunConfig.parse(flat | {"run.logs": "anna", "run.name": "logs"})
    with pytest.raises(Exception, match="No site 'anna' is connected"):
        looking.logs(config, grid, Journal(), names)


def test_a_key_says_the_studies_of_its_site_and_other_sites_do_not_learn_them(
    tmp_path: Path,
) -> None:
    def done(*given: str) -> str:
        result = CliRunner().invoke(app, ["keys", *given, "--dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.output

    public_key = tmp_path / "nodes" / "anna.pub"
    done("add", "anna", "--role", "source", "--study", "heart", "--study", "lungs")
    assert keys.studies(public_key) == ("heart", "lungs") and keys.role(public_key) == "source"
    assert "anna  source only  studies heart, lungs" in done("list")
    assert "heart" not in (tmp_path / "peers").read_text()
    assert [*keys.peers(tmp_path / "peers", "source")] == ["anna"]
    assert not keys.peers(tmp_path / "peers", "target")
    before = keys.public_key(public_key)
    done("studies", "anna", "brain")
    assert keys.studies(public_key) == ("brain",) and keys.role(public_key) == "source"
    done("studies", "anna")
    assert keys.studies(public_key) == () and keys.public_key(public_key) == before
    for words_, said in ((["anna", "../x"], "cannot be a study"), (["bert"], "no site 'bert'")):
        result = CliRunner().invoke(app, ["keys", "studies", *words_, "--dir", str(tmp_path)])
        assert result.exit_code == 3 and said in result.output


def test_runs_are_found_by_their_study(tmp_path: Path) -> None:
    runs = [RunNow(3, "c", "/c", "kd3a", "running"), RunNow(2, "b", "/b", "kd3a", "running")]
    runs = [replace(runs[0], study="lungs"), replace(runs[1], study="heart")]
    now = Snapshot((), tuple(runs))
    assert (
        now.run() is runs[0] and now.run("", "heart") is runs[1] and now.run("c", "heart") is None
    )
    assert Snapshot.of(json.loads(json.dumps(now.to_json()))) == now


def test_attach_and_stop_choose_among_the_runs_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, study in zip(folders, ("heart", "lungs"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"run.study": study}))
    stopped = []
    monkeypatch.setattr("fedda.cli.watching.all_going_on", lambda _: folders)
    monkeypatch.setattr("fedda.cli.watching.stop", stopped.append)
    words_ = ["stop", "--dir", str(tmp_path)]
    assert "2 runs are going on" in CliRunner().invoke(app, words_).output
    assert CliRunner().invoke(app, [*words_, "--study", "lungs"]).exit_code == 0
    assert stopped == [folders[1]]
    none = CliRunner().invoke(app, [*words_, "--study", "brain"])
    assert none.exit_code == 1 and "No run of the study brain is going on" in none.output


def test_a_report_finds_the_files_of_a_study(tmp_path: Path) -> None:
    results: dict[str, Any] = {"name": "r", "config": {"run.study": "heart"}}
    assert at_site(results) == "heart+r" and at_site({"name": "r", "config": None}) == "r"
    training = {"refined": {"changed": 0.1, "agreed": 0.9}, "target": "town", "seed": 0}
    training["model"] = "/runs/r/kd3a-0/model.safetensors"
    results |= {"trainings": {"kd3a": [training]}, "titles": {"kd3a": "KD3A"}, "method": "kd3a"}
    assert "town/heart+r.kd3a-0.refined.safetensors" in refined_at(results)[0]
