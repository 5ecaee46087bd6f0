"""The chained log, the site's audit log, and the comparison with the server's record."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import Result
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from typer.testing import CliRunner

from clients.app import _is_own
from clients.node.resident import Resident
from clients.policy import audit_log
from clients.policy.audit_log import AuditLog
from fedda import records
from fedda.cli import app
from fedda.errors import Code
from fedda.ops import chain
from fedda.ops.chain import Chain
from tests.federation import PATIENCE
from tests.local_grid import Bench, Node
from tests.test_resident import message

pytestmark = pytest.mark.usefixtures("fresh_sites")


def written(path: Path, lines: int, most: int = chain.MOST) -> Chain:
    log = Chain(path, durable=False, most=most)
    for i in range(lines):
        log.add(event="note", i=i)
    return log


# ---- the chain -----------------------------------------------------------------------------------


def test_a_chain_holds_over_objects_processes_and_files(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = written(path, 30, most=600)
    written(path, 5, most=600)
    first.add(event="last")
    found = chain.check(path)
    assert (len(found.entries), found.bad, found.notes) == (36, "", [])
    assert len(chain.aside(path)) > 5
    assert [entry["n"] for entry in found.entries] == list(range(1, 37))


def test_a_chain_goes_on_if_the_newest_file_was_only_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 3)
    path.rename(tmp_path / "log.000001.jsonl")
    written(path, 2)
    assert len(chain.check(path).entries) == 5 and not chain.check(path).bad


@pytest.mark.parametrize("change", ["value", "gone", "order", "added", "hash", "file"])
def test_every_change_of_a_line_is_found(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 40, most=1500)
    file = chain.aside(path)[1]
    lines = file.read_text().splitlines()
    if change == "value":
        lines[2] = lines[2].replace('"i":', '"i":7')
    elif change == "gone":
        del lines[2]
    elif change == "order":
        lines[2], lines[3] = lines[3], lines[2]
    elif change == "added":
        lines.insert(2, lines[2])
    elif change == "hash":
        entry = json.loads(lines[2])
        lines[2] = json.dumps({**entry, "prev": "0" * 64}, separators=(",", ":"))
    file.write_text("\n".join(lines) + "\n")
    if change == "file":
        file.unlink()
    assert chain.check(path).bad


def test_a_torn_line_is_told_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = written(path, 3)
    whole = path.read_bytes()
    line = whole.splitlines()[-1]
    for cut in (1, 20, len(line) - 1, len(line)):
        path.write_bytes(whole + line[:cut])
        found = chain.check(path)
        assert not found.bad or cut == len(line)
        path.write_bytes(whole[: -len(line) - 1] + line[:cut])
        log.add(event="next")
        found = chain.check(path)
        assert not found.bad
        assert bool(found.notes) is (cut < len(line))
        assert found.entries[-1]["event"] == "next"


def test_a_torn_piece_that_was_changed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = written(path, 3)
    path.write_bytes(path.read_bytes() + b'{"n":4,"prev":"abc')
    log.add(event="next")
    assert not chain.check(path).bad
    path.write_bytes(path.read_bytes().replace(b'"prev":"abc\n', b'"prev":"abd\n'))
    assert "cannot be read" in chain.check(path).bad


def test_an_unknown_folder_is_a_clear_error(tmp_path: Path) -> None:
    done = fedda(tmp_path)
    assert done.exit_code == 1 and "audit.jsonl does not exist" in done.output


# ---- what is hashed ------------------------------------------------------------------------------


def content(data: bytes = b"1234", number: float = 1.0, name: str = "model") -> RecordDict:
    array = Array("uint8", (len(data),), records.STYPE, data)
    return RecordDict(
        {
            "arrays": ArrayRecord({name: array}),
            "metrics": MetricRecord({"loss": number}),
            "task": ConfigRecord({"run": "r", "b": b"\x00", "n": 1}),
        }
    )


def test_the_hash_depends_on_everything_and_on_no_order() -> None:
    wanted = records.digest(message(held=content()))
    assert wanted == records.digest(message(held=content()))
    reordered = RecordDict(dict(reversed(list(content().items()))))
    assert records.digest(message(held=reordered)) == wanted
    others = [content(b"1235"), content(number=1.5), content(name="other"), RecordDict()]
    hashes = {records.digest(message(held=other)) for other in others}
    assert len(hashes) == 4 and wanted not in hashes
    asked = message(held=content())
    errors = {records.digest(Message(Error(code, "text"), reply_to=asked)) for code in (1, 2)}
    assert len(errors) == 2


# ---- the site's audit log ------------------------------------------------------------------------


def fedda(state: Path, *words: str | Path) -> Result:
    return CliRunner().invoke(app, ["policy", "log", "--state-dir", str(state), *map(str, words)])


def audited(nodes: list[Node], folder: Path) -> list[Node]:
    place = {"audited": True, "notes": False}
    return [{**n, **place, "state-dir": str(folder / str(n["name"]))} for n in nodes]


def test_every_message_is_noted_without_a_value(domains: list[Node], tmp_path: Path) -> None:
    bench = Bench(audited(domains, tmp_path), "fedavg", wait__train=PATIENCE)
    request = bench.begin()[0]
    reply = bench.call(request)
    arrays, tables = records.read(reply.content)
    found = chain.check(tmp_path / "anna" / "audit.jsonl")
    *_, received, answered = found.entries
    assert (received["event"], answered["event"]) == ("received", "answered")
    assert received["sha256"] == records.digest(request)
    assert answered["sha256"] == records.digest(reply)
    assert (answered["run"], answered["training"], answered["round"]) == ("run", "fedavg-0", 1)
    (array,) = answered["arrays"]
    entries = arrays["model"].manifest.entries
    assert array["shapes"] == [list(entry.shape) for entry in entries]
    assert (array["kind"], array["bytes"]) == ("model", arrays["model"].manifest.nbytes)
    assert set(answered["numbers"]) == set(tables["metrics"])
    values = [{k: v for k, v in entry.items() if k != "time"} for entry in (received, answered)]
    numbers = re.findall(r"\d+\.\d+", json.dumps(values))
    assert not {float(n) for n in numbers} & {float(n) for n in tables["metrics"].values()}


def test_refused_and_unreadable_requests_are_noted_too(domains: list[Node], tmp_path: Path) -> None:
    bench = Bench(audited(domains, tmp_path), "fedavg", wait__train=PATIENCE)
    request = bench.begin()[0]
    request.content["other"] = ConfigRecord({"x": 1})
    reply = bench.call(request)
    assert Code(reply.error.code) is Code.WIRE
    *_, received, refused = chain.check(tmp_path / "anna" / "audit.jsonl").entries
    assert received["unreadable"] and received["sha256"] == records.digest(request)
    assert (refused["event"], refused["code"]) == ("refused", "WIRE")
    assert refused["sha256"] == records.digest(reply)


@pytest.mark.parametrize("broken", ["log", "state"])
def test_a_site_that_cannot_write_its_log_answers_nothing_and_says_where_once(
    domains: list[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    bench = Bench(audited(domains, tmp_path), "fedavg", wait__train=PATIENCE)
    request = bench.begin()[0]
    place = tmp_path / "anna" if broken == "state" else tmp_path / "anna" / "audit.jsonl"
    kept = place.rename(tmp_path / "kept")
    place.touch() if broken == "state" else place.mkdir()
    caplog.clear()
    assert Code(bench.call(request).error.code) is Code.DISK
    (told,) = [each for each in caplog.records if each.name == "fedda.site"]
    assert told.getMessage().startswith(f"{place} cannot be used (") and not told.exc_info
    assert "put back there what this account can read and write" in told.getMessage()
    place.unlink() if broken == "state" else place.rmdir()
    kept.rename(place)
    assert bench.call(request).has_content()


def test_a_full_disk_is_told_with_the_path_and_refuses_the_request(
    domains: list[Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(audited(domains, tmp_path), "fedavg", wait__train=PATIENCE)
    request = bench.begin()[0]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # of an open file: without its path

    caplog.clear()
    monkeypatch.setattr(chain.os, "fsync", full)
    assert Code(bench.call(request).error.code) is Code.DISK
    (told,) = [each for each in caplog.records if each.name == "fedda.site"]
    path = tmp_path / "anna" / "audit.jsonl"
    assert told.getMessage().startswith(f"{path} cannot be used (No space left on device), so ")
    assert "make room there" in told.getMessage() and not told.exc_info


@pytest.mark.parametrize(("kind", "code"), [("train", Code.EXPIRED), ("get_parameters", Code.WIRE)])
def test_what_the_node_refuses_by_itself_is_noted(kind: str, code: Code, tmp_path: Path) -> None:
    asked = message(kind, held=content(), age=3600)
    trail = AuditLog(tmp_path)
    node = Resident(lambda *_: asked, {}, lambda *_: None, trail.answered)
    reply = node.answer(asked, lambda: asked, 7)
    assert Code(reply.error.code) is code
    (refused,) = chain.check(tmp_path / "audit.jsonl").entries
    assert (refused["event"], refused["code"]) == ("refused", code.name)
    assert refused["sha256"] == records.digest(reply)


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    trail = AuditLog(None)
    trail.started("anna", "")
    trail.received(message(held=content()))
    assert os.listdir(tmp_path) == []


def test_the_table_shows_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    Chain(tmp_path / "audit.jsonl").add(event="received", run="a\x1b[2Jb", kind="[red]train")
    shown = fedda(tmp_path)
    assert shown.exit_code == 0
    assert "\x1b[2J" not in shown.output and "[red]" in shown.output


# ---- beside the server's record ------------------------------------------------------------------


def test_a_hash_that_only_one_side_has_is_named() -> None:
    here = [
        {"event": "received", "run_id": 1, "sha256": "a", "kind": "train"},
        {"event": "answered", "run_id": 1, "sha256": "b", "kind": "train"},
        {"event": "answered", "run_id": 1, "sha256": "q", "kind": "query"},
        {"event": "received", "run_id": 2, "sha256": "other run", "kind": "train"},
        {"event": "summed", "run_id": 1, "sha256": "of nothing", "frames": 0},
        {"event": "started", "site": "anna"},
    ]
    there = [
        {"event": "sent", "site": "anna", "run_id": 1, "sha256": "a", "round": 3},
        {"event": "received", "site": "anna", "run_id": 1, "sha256": "b"},
        {"event": "sent", "site": "bert", "run_id": 1, "sha256": "c"},
    ]
    assert audit_log.compare("anna", here, there) == (2, [])
    both, odd = audit_log.compare("anna", here, there[:1])
    assert both == 1 and odd[0].startswith("a reply of this site (hash b) is in this site's log")
    both, odd = audit_log.compare("anna", here[1:], there)
    assert both == 1 and odd[0].startswith("a request of the server of round 3 (hash a) is in the ")
    twice = [*there, there[1]]
    assert audit_log.compare("anna", here, twice)[0] == 2
    assert len(audit_log.compare("anna", here, twice)[1]) == 1


@pytest.mark.parametrize("missing", [3, 4])
def test_few_of_many_missing_payloads_are_told_and_their_number(
    tmp_path: Path, missing: int
) -> None:
    """As of a log that began after the run."""
    state, record = Chain(tmp_path / "s" / "audit.jsonl"), Chain(tmp_path / "r" / "crossed.jsonl")
    state.add(event="received", run_id=1, sha256="same", kind="train")
    for text in ("same", *map(str, range(missing))):
        record.add(event="sent", site="anna", run_id=1, sha256=text)
    words = ("--verify", "--against", tmp_path / "r")
    done = fedda(tmp_path / "s", *words, "--site", "anna")
    lines = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert done.exit_code == 1 and len(lines) == missing
    assert (f"{missing} such payloads in all" in lines[-1]) == (missing > 3)
    assert "1 payloads of anna are in both" in done.output

    done = fedda(tmp_path / "s", *words)  # neither the log nor its folder says whose it is
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert done.exit_code == 1 and "are in both" not in done.output
    assert line.endswith("which site's it is: give --site NAME (the record has anna)")
    (tmp_path / "s").rename(tmp_path / "anna")
    assert "1 payloads of anna are in both" in fedda(tmp_path / "anna", *words).output


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (FileNotFoundError(2, "none", "x.npz"), True),
        (FileNotFoundError(2, "none", "/etc/x"), False),
        (OSError(9, "of a number, as of a pipe", 5), False),
        (ConnectionResetError(104, "of no file"), False),
    ],
)
def test_only_a_file_of_the_sites_own_is_its_disks_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, own: bool
) -> None:
    """Also where the program was started in the folder of the data."""
    monkeypatch.chdir(tmp_path)
    assert _is_own(error, {"data": str(tmp_path), "state-dir": ""}) is own
