"""`fedda watch`: what it writes to a terminal and to a pipe, and when it ends."""

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from fedda.cli import watch
from fedda.errors import RunError
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.results import progress
from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from server.superlink.book import Book
from tests.test_live import run, sites

__all__ = ["run"]  # a fixture


class Looks:
    """What a server tells, look by look; the last one for ever. None: it does not answer."""

    def __init__(self, *told: Snapshot | None) -> None:
        self.told = list(told)

    def __call__(self) -> Snapshot:
        now = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        if now is None:
            raise RunError("no server answers")
        return now


def watched(looks: Looks, which: str = "", *, terminal: bool = False) -> tuple[int, str]:
    """Watch -> the exit code, and what was printed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    return watch.Watcher(looks, which, console).follow(), out.getvalue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK", 0.01)
    monkeypatch.setattr(progress, "_LOOK", 0.01)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("completed", 0, "run r has finished"),
        ("failed", 1, "run r has failed"),
        ("stopped", 1, "run r has been stopped"),
    ],
)
def test_a_run_that_has_ended_is_not_waited_for(
    run: RunNow, ending: str, code: int, said: str
) -> None:
    ended = replace(sites(run), runs=(replace(run, status="finished", ending=ending),))
    found, text = watched(Looks(ended))
    assert (found, said in text) == (code, True)
    assert text.splitlines()[:2] == ["site a is reachable", "site t is away"]


def test_a_run_is_shown_line_by_line_until_it_ends(run: RunNow) -> None:
    now = sites(run)
    gone = replace(now, sites=(replace(now.sites[0], online=False), now.sites[1]))
    ended = replace(now, runs=(replace(run, status="finished", ending="completed"),))
    looks = Looks(replace(now, runs=()), None, now, now, gone, ended)
    found, text = watched(looks)
    assert found == 0
    lines = text.splitlines()
    assert "waiting for a run to begin: fedda run METHOD --server DIR" in lines
    assert [line for line in lines if "round 1/4" in line or "round 2/4" in line]
    assert "round 2: a: x" in lines and "site a is away" in lines
    assert all(line.isprintable() for line in lines)


def test_a_terminal_shows_the_sites_and_their_work(run: RunNow) -> None:
    ended = replace(sites(run), runs=(replace(run, status="finished", ending="completed"),))
    _, text = watched(Looks(sites(run), sites(run), ended), terminal=True)
    assert "1 of 2 sites reachable" in text and "trains" in text


def test_a_server_that_is_gone_ends_the_watch(run: RunNow) -> None:
    with pytest.raises(RunError, match="no server answers"):
        watched(Looks(None))
    with pytest.raises(RunError, match="no server answers"):
        watched(Looks(replace(sites(run), runs=()), None))


def test_a_run_that_the_server_does_not_know_is_not_waited_for(run: RunNow) -> None:
    with pytest.raises(RunError, match="knows no run 'new'; it has r, old"):
        watched(Looks(sites(run)), "new")


def test_a_name_from_a_site_cannot_command_the_terminal() -> None:
    bad = Snapshot(
        (SiteNow(1, "a\x1b[2Jb\nc", "source", True),), (RunNow(1, "r", "/r", "m", "finished"),)
    )
    _, text = watched(Looks(bad))
    assert "site a [2Jb c is reachable" in text and "\x1b" not in text


def test_the_book_says_who_works_on_what() -> None:
    def handed(message: str, kind: str, run_id: int) -> fleet.PullMessagesResponse:
        about = {"message_id": message, "message_type": kind, "run_id": run_id}
        head = proto.Message(metadata=proto.Metadata(created_at=time.time(), ttl=60, **about))
        tree = proto.ObjectTree(object_id=message)
        return fleet.PullMessagesResponse(messages_list=[head], message_object_trees=[tree])

    book = Book()
    book.handed(1, handed("m1", "query", 7))
    book.handed(1, handed("m2", "train", 7))
    book.handed(2, handed("m3", "evaluate", 7))
    assert book.open() == {1: ("train", 7), 2: ("evaluate", 7)}
    for found in [*book._handed[1].values(), *book._handed[2].values()]:
        book.answered(found, fleet.PushMessagesResponse())
    assert book.open() == {}
