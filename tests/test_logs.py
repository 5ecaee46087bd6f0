"""`fedda logs`: what of a site's log leaves, that no planted name does, and who is told why not."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import Message
from typer.testing import CliRunner

from clients.site import plain_log
from clients.site.memory import Site
from clients.site.plain_log import EVENT, EVENTS, LOG, MOST_BYTES, PlainLog
from fedda import records
from fedda.cli import app
from fedda.errors import Code, DataError, QuorumError
from fedda.results.read import LOOKED
from fedda.settings import RunConfig
from server import looking
from server.journal import Journal
from tests.federation import Federation
from tests.local_grid import Node, ScriptedGrid
from tests.patience import PATIENCE, wait_until
from tests.processes import leaving_nothing

pytestmark = pytest.mark.usefixtures("fresh_sites", "signal_handlers")

FILE, LABEL = "/data/scans/patient-4711.png", "melanoma"  # planted: neither may leave
YES = '{"leaving": {"logs": true}}'
ROOT = Path(plain_log.__file__).parents[2]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainLog]:
    """A log of this process, as a client keeps it; these tests count as the program's code."""
    monkeypatch.setattr(plain_log, "ROOTS", (*plain_log.ROOTS, Path(__file__).parent))
    root, level = logging.getLogger(), logging.getLogger("fedda").level
    root.addHandler(LOG)
    logging.getLogger("fedda").setLevel(logging.INFO)
    LOG._lines.clear()
    yield LOG
    LOG._lines.clear()
    root.removeHandler(LOG)
    logging.getLogger("fedda").setLevel(level)


def as_of(file: str, msg: str, *args: Any, error: BaseException | None = None) -> str:
    """The plain line of a record from a file."""
    about = (type(error), error, None) if error else None
    record = logging.LogRecord(EVENTS, logging.WARNING, file, 7, msg, args, about)
    return plain_log.plain(record)


OURS = str(ROOT / "clients" / "site" / "notes.py")


def test_what_is_put_into_a_message_does_not_leave() -> None:
    assert as_of(OURS, "no notes in %s", FILE).endswith("notes.py:7 …")  # which stands nowhere
    assert as_of(OURS, f"cannot read {FILE} of {LABEL}").endswith("notes.py:7 …")
    said = as_of(OURS, "%s", DataError(f"{FILE} has the label {LABEL}"))
    assert said.endswith(f"… [DataError: {Code.DATA.public}]")
    failed = as_of(OURS, "the request failed", error=KeyError(LABEL))
    assert failed.endswith(f"[KeyError: {Code.INTERNAL.public}]")
    assert as_of("/lib/other/package.py", "%s", FILE) == "another package wrote a line"


def test_events_that_the_server_knows_are_told_whole() -> None:
    assert (
        as_of(OURS, EVENT, "done", "train for run 3 in 0.50 s") == "done: train for run 3 in 0.50 s"
    )
    assert as_of(OURS, EVENT, "waiting", f"connecting through {FILE}") == "waiting"
    assert FILE not in as_of(OURS, EVENT, FILE, LABEL)


def logs(kept: PlainLog) -> list[str]:
    """The plain lines so far, without their times."""
    return [line.split(" ", 2)[2] for line in kept.text().splitlines()]


def test_only_words_that_stand_in_the_code_leave(kept: PlainLog) -> None:
    """What was put together before it is logged has none, with arguments or without."""
    logger = logging.getLogger("fedda.site")
    logger.warning("cannot read %s", FILE)
    logger.warning("no last step")
    logger.warning(
        "of %s there are %d",
        LABEL,
        3,
    )
    logger.warning(f"cannot read {FILE}: %s", LABEL)
    logger.warning(FILE + " is %s", LABEL)
    logger.warning("%s of " + LABEL, FILE)
    logger.warning(LABEL)
    said = [line.split(" ", 2)[2] for line in logs(kept)]
    assert said == ["cannot read …", "no last step", "of … there are …", *["…"] * 4]


def test_a_package_cannot_log_in_fedda_s_name(kept: PlainLog, tmp_path: Path) -> None:
    """Code that says the line of its caller, as packages that warn do."""
    (tmp_path / "plugin.py").write_text(
        "import logging\n"
        "def warn(text):\n"
        "    logging.getLogger('plugin').warning(text + ' of %s', 3, stacklevel=2)\n"
    )
    code = compile((tmp_path / "plugin.py").read_text(), str(tmp_path / "plugin.py"), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    names["warn"](LABEL)
    logging.addLevelName(31, LABEL)
    logging.getLogger("fedda.site").log(31, "a level of %s", LABEL)
    first, second = logs(kept)
    assert first.startswith("WARNING tests/test_logs.py:") and first.endswith(" …")
    assert second.startswith("OTHER ") and LABEL not in kept.text()


class Patient4711Error(DataError):
    """A package's own, whose name nobody has read."""


def test_an_error_of_a_package_counts_as_what_it_derives_from() -> None:
    assert as_of(OURS, "%s", Patient4711Error(FILE)).endswith(f"[DataError: {Code.DATA.public}]")
    other = type("melanoma", (ValueError,), {})()
    assert as_of(OURS, "%s", other).endswith(f"[ValueError: {Code.INTERNAL.public}]")


@pytest.mark.parametrize("name", sorted(plain_log.KINDS))
def test_a_site_s_name_makes_no_event_of_a_warning(kept: PlainLog, name: str) -> None:
    """Warnings of a site's data begin with its name, and are of the form of an event."""
    node = {"role": "target", "name": name, "data": "/data"}
    Site(node)._say(f"{FILE} is {LABEL}")
    (line,) = logs(kept)
    assert line.endswith(" …: …"), line


def test_an_answer_is_bounded(kept: PlainLog) -> None:
    for n in range(plain_log.LINES + 100):
        record = logging.LogRecord(
            EVENTS, 20, OURS, 7, EVENT, ("work", f"run {n} {'é' * 40}"), None
        )
        kept.emit(record)
    text = kept.text()
    assert MOST_BYTES - 200 < len(text.encode()) <= MOST_BYTES
    assert text.endswith(f"run {plain_log.LINES + 99} {'é' * 40}")


# ---- asking a site ------------------------------------------------------------------------------


def ask(nodes: list[Node], folder: Path, site: str = "town") -> tuple[str, ScriptedGrid]:
    grid, journal = ScriptedGrid(nodes), Journal(folder / "logs" / "journal.jsonl")
    config = RunConfig.parse({"run.dir": str(folder), "run.name": "logs", "run.logs": site})
    names = {number: node["name"] for number, node in grid.nodes.items()}
    looking.logs(config, grid, journal, names)
    return json.loads((folder / "logs" / LOOKED).read_text())["text"], grid


def with_policy(domains: list[Node], policy: str) -> list[Node]:
    return [n | {"policy": policy} if n["name"] == "town" else n for n in domains]


def test_planted_names_do_not_leave_and_the_state_of_work_does(
    domains: list[Node], tmp_path: Path, kept: PlainLog
) -> None:
    logger = logging.getLogger("fedda.site")
    logger.error("%s", DataError(f"{FILE} has the label {LABEL}"))
    logging.getLogger(EVENTS).info(EVENT, "work", "train for run 3")
    logging.getLogger(FILE).warning("%s of %s", FILE, LABEL)
    logger.warning(f"{FILE} is {LABEL}")
    text, grid = ask(with_policy(domains, YES), tmp_path)
    assert "work: train for run 3" in text and "WARNING" in text
    everything = [str(m.content) for m in (*grid.requests, *grid.replies)]
    for planted in (FILE, "patient-4711", LABEL, "/data"):
        assert planted not in text
        assert not any(planted in each for each in everything)
    (asked,) = grid.requests  # of the named site alone
    assert grid.nodes[asked.metadata.dst_node_id]["name"] == "town"
    assert records.read(asked.content) == ({}, {"logs": {"run": "logs"}})


@pytest.mark.parametrize("policy", ["", "{}", '{"leaving": {"logs": false, "look": true}}'])
def test_no_site_tells_unless_its_policy_says_so(
    domains: list[Node], tmp_path: Path, kept: PlainLog, policy: str
) -> None:
    logging.getLogger(EVENTS).info(EVENT, "work", "train for run 3")
    with pytest.raises(QuorumError, match=r"town tells no line of its log: .*leaving\.logs = true"):
        ask(with_policy(domains, policy), tmp_path)


def test_a_site_that_is_not_there_is_named(domains: list[Node], tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match="No site 'nobody' is connected; there are anna, bert"):
        ask(domains, tmp_path, "nobody")


@pytest.mark.parametrize(
    "tables", [{"logs": {}}, {"logs": {"run": "x", "lines": 9}}, {"look": {"run": "x"}}]
)
def test_a_request_can_choose_nothing(domains: list[Node], tables: dict[str, Any]) -> None:
    grid = ScriptedGrid(with_policy(domains, YES))
    content = records.write(**tables)
    reply = grid.call(Message(content, grid.id_of("town"), "query.logs", ttl=60))
    assert reply.error.code == Code.WIRE


@pytest.mark.parametrize("told", [{}, {"text": 3}, {"text": "a", "more": "b"}])
def test_the_server_takes_nothing_but_a_text(told: dict[str, Any]) -> None:
    asked = Message(records.write(logs={"run": "x"}), 1, "query.logs", ttl=60)
    with pytest.raises(Exception, match="something else than lines"):
        looking._lines(Message(records.write(logs=told), reply_to=asked))


# ---- over processes ------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Federation]:
    (tmp_path / "policy.toml").write_text("[leaving]\nlogs = true\n")
    options = {"anna": ["--policy", str(tmp_path / "policy.toml")], "town": ["--page", "0"]}
    with leaving_nothing(Federation(tmp_path / "hub", client_options=options)) as made:
        yield made


@pytest.mark.slow
def test_an_operator_sees_a_sites_plain_lines_and_a_site_its_own_page(hub: Federation) -> None:
    done = CliRunner().invoke(app, ["logs", "anna", "--server", str(hub.home), "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    assert any(line.endswith("INFO connected") for line in lines), lines
    assert not any(str(hub.directory) in line or ".npz" in line for line in lines)
    done = CliRunner().invoke(app, ["logs", "bert", "--server", str(hub.home)])
    assert done.exit_code == 1 and "leaving.logs = true" in done.output
    log = hub.logs / "town.log"
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+", log.read_text())
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        assert "as node" in client.get(address).text
        origin = {"origin": address.rpartition("/")[0]}
        assert client.post(f"{address}/stop", headers=origin).status_code == 303
    wait_until(lambda: "left the server on request" in log.read_text(), "town did not leave")
