"""The site's own page: what it shows, who may see it and press its button; how a site leaves."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from clients.node import ending as leaving
from clients.node import own_page, resident
from clients.node.ending import QUIET_S, Ending
from clients.node.failures import Unreachable
from clients.node.own_page import OwnPage, served
from clients.node.standing import Standing
from clients.policy.rules import Policy
from clients.policy.seen import Seen
from fedda.cli.client import app as client_command
from fedda.errors import ConfigError
from fedda.ops.chain import Chain
from tests.local_grid import Node, run
from tests.patience import PATIENCE, wait_until
from tests.test_resident import FakeConnection, echo, message

SCRIPT = "<script>alert(1)</script>"


def following(state: Path, policy: Policy | None = None) -> Seen:
    return Seen(state, policy or Policy())


@pytest.fixture
def ending() -> Ending:
    return Ending()


@pytest.fixture
def page(tmp_path: Path, ending: Ending) -> Iterator[OwnPage]:
    standing = Standing(tmp_path)
    standing.tell("connected", "to hub:8443 as node 7")
    with served("clinic-a", following(tmp_path), standing, ending, 0) as made:
        yield made


def ask(page: OwnPage, path: str = "", **options: Any) -> httpx.Response:
    method = options.pop("method", "GET")
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        return client.request(method, page.address + path, **options)


# ---- what it shows -----------------------------------------------------------------------------


def test_the_page_shows_a_real_runs_requests_and_bytes_and_refusals(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    policy = Policy.model_validate({"leaving": {"tests": False}, "budget": {"rounds": 9}})
    mine = {"state-dir": str(tmp_path / "town"), "audited": True}
    mine |= {"policy": policy.model_dump_json(by_alias=True)}
    nodes = [n | mine if n["name"] == "town" else n for n in domains]
    other, _ = run(nodes, runs | {"method": "adabn", "rounds": 1})
    now = following(tmp_path / "town", policy).look("connected")
    assert {each.training for each in now.asked} >= {"adabn-0"}
    assert any(
        each.what.endswith(" as target") and "model (model)" in each.came for each in now.asked
    )
    assert now.refused and all("policy" in each.why for each in now.refused)
    assert now.left["model"] > 1000 and now.messages["model"] == 1
    assert now.left["scalars"] > 0
    (rounds,) = (row for row in now.budgets if row[0] == "requests to train")
    assert rounds == ("requests to train", "1", "9")
    assert any("Never leave: numbers of tests" in line for line in now.policy)
    sent = other["trainings"]["adabn"][0]["bytes"]
    assert now.left["model"] <= sum(n for k, n in sent.items() if k == "from target model")


def test_it_follows_the_log_into_a_new_file(tmp_path: Path) -> None:
    seen, log = following(tmp_path), Chain(tmp_path / "audit.jsonl", durable=False)
    assert seen.look("").asked == []
    for n in range(3):
        log.add(event="received", kind="train", run=f"r{n}", bytes=n)
    assert [each.run for each in seen.look("").asked] == ["r2", "r1", "r0"]
    log.add(event="summed", group="discriminator", bytes=70)
    assert seen.look("").left == {"gradient": 70}
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit.000001.jsonl")
    Chain(tmp_path / "audit.jsonl", durable=False).add(event="received", kind="query")
    for _ in range(40):  # by now it is the longer one
        Chain(tmp_path / "audit.jsonl", durable=False).add(event="received", kind="query")
    now = seen.look("")
    assert {each.what for each in now.asked} == {"query"} and now.left == {}


def test_a_servers_words_are_shown_as_text(page: OwnPage, tmp_path: Path) -> None:
    log = Chain(tmp_path / "audit.jsonl", durable=False)
    log.add(event="received", kind=SCRIPT, run=SCRIPT, numbers=[SCRIPT], round=SCRIPT)
    text = ask(page).text
    assert SCRIPT not in text and "&lt;script&gt;" in text
    assert "connected" not in text and "to hub:8443 as node 7" in text


# ---- who may see it, and press its button --------------------------------------------------------


def test_only_who_knows_the_address_sees_it(page: OwnPage, ending: Ending) -> None:
    assert ask(page).status_code == 200
    root = page.address.rpartition("/")[0]
    for path in ("", "/", "/guess", "/stop", "/guess/stop"):
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            assert client.get(root + path).status_code in (403, 404, 405)
            own = {"origin": root}
            assert client.post(root + path, headers=own).status_code in (403, 404, 405)
    assert not ending.asked


def test_a_page_under_another_host_name_sees_nothing(page: OwnPage) -> None:
    """DNS rebinding: its own name leads to this machine."""
    port = page.address.split(":")[2].split("/")[0]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        found = ask(page, headers={"host": host})
        assert found.status_code == 400 and "clinic-a" not in found.text


@pytest.mark.parametrize("origin", [None, "null", "https://evil.example", "http://127.0.0.1:1"])
def test_another_pages_form_stops_nothing(
    page: OwnPage, ending: Ending, origin: str | None
) -> None:
    headers = {} if origin is None else {"origin": origin}
    assert ask(page, "/stop", method="POST", headers=headers).status_code == 403
    assert ask(page, "/stop").status_code == 405  # nor does a link
    assert not ending.asked


def test_its_own_button_stops_the_site(page: OwnPage, ending: Ending) -> None:
    (action,) = re.findall(r'<form method="post" action="([^"]+)"', ask(page).text)
    root = page.address.rpartition("/")[0]
    assert f"{root}{action}" == f"{page.address}/stop"
    answer = ask(page, "/stop", method="POST", headers={"origin": root})
    assert answer.status_code == 303 and ending.asked
    shown = ask(page).text
    assert "leaves its server when the round is over" in shown and "<form" not in shown


def test_no_other_machine_reaches_it_and_nothing_is_kept(page: OwnPage) -> None:
    assert page.address.startswith("http://127.0.0.1:")
    answer = ask(page)
    assert answer.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "form-action &#x27;self&#x27;" in answer.text or "form-action 'self'" in answer.text


def test_another_user_cannot_take_the_files_that_the_site_works_with(page: OwnPage) -> None:
    """Each connection that somebody begins and leaves open is a file of this process."""
    port = int(page.address.split(":")[2].split("/")[0])
    with contextlib.ExitStack() as stack:
        begun = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            for _ in range(own_page.MOST + 8)
        ]
        closed = [each for each in begun[own_page.MOST :] if each.recv(1) == b""]
        assert len(closed) == 8
    wait_until(lambda: answers(page), "the page did not answer again")


def answers(page: OwnPage) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return ask(page).status_code == 200
    return False


def test_a_port_in_use_is_refused_in_a_sentence(page: OwnPage, tmp_path: Path) -> None:
    port = int(page.address.split(":")[2].split("/")[0])
    standing = Standing(tmp_path)
    with (
        pytest.raises(ConfigError, match=f"--page {port} cannot be used .*; give another port"),
        standing.until_it_fails(),
        served("b", following(tmp_path), standing, Ending(), port),
    ):
        pass
    kept = json.loads(standing.path.read_text())
    assert kept["standing"] == "stopped" and "cannot be used" in kept["text"]


def test_flowers_own_node_serves_no_page() -> None:
    words = "--role source --data . --superlink hub:1 --insecure --stock --page 0"
    result = CliRunner().invoke(client_command, words.split())
    assert result.exit_code == 1 and "--page is not served with --stock" in result.output


# ---- leaving after the round ---------------------------------------------------------------------


def served_rounds(ending: Ending, *rounds: str) -> list[str]:
    """Serve messages of these rounds; the site is asked to stop while it works on the first."""
    answered: list[str] = []

    def app(received: Any, context: Any) -> Any:
        answered.append(received.metadata.group_id)
        ending.ask()
        return echo(received, context)

    inbox = []
    for number in rounds:
        each = message()
        each.metadata.__dict__["_group_id"] = number
        inbox.append(each)
    node = resident.Resident(app, {}, lambda kind, text: None)
    with pytest.raises(resident.Stopped):
        resident.work(node, FakeConnection(*inbox), 0.0, ending=ending)  # type: ignore[arg-type]
    return answered


def test_a_site_that_is_to_stop_still_serves_its_round(ending: Ending) -> None:
    assert served_rounds(ending, "1", "1", "2", "3") == ["1", "1"]


def test_a_server_cannot_keep_a_site_by_a_round_without_end(ending: Ending) -> None:
    rounds = ["1"] * (3 * leaving.MOST)
    assert len(served_rounds(ending, *rounds)) == leaving.MOST


def test_an_idle_site_stops_at_once_and_a_busy_one_once_it_is_quiet(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(leaving, "time", SimpleNamespace(monotonic=lambda: now))
    assert not ending.over(None)
    ending.worked(message())
    ending.ask()
    assert not ending.over(None)
    now += QUIET_S
    assert ending.over(None)
    idle = Ending()
    idle.ask()
    assert idle.over(None)


def test_a_site_whose_server_does_not_answer_stops(ending: Ending) -> None:
    """While it joins, and in the middle of a session."""
    said: list[str] = []

    def tell(kind: str, text: str) -> None:
        said.append(kind)
        ending.ask()

    with socket.create_server(("127.0.0.1", 0)) as listens:
        nobody = f"127.0.0.1:{listens.getsockname()[1]}"
    resident.serve(
        echo, superlink=nobody, node_config={}, insecure=True, on_event=tell, ending=ending
    )
    assert said == ["waiting", "stopped"]

    class Silent(FakeConnection):
        def receive(self) -> Any:
            raise Unreachable("no answer")

    later = Ending()
    node = resident.Resident(echo, {}, lambda kind, text: later.ask())
    with pytest.raises(resident.Stopped):
        resident.work(node, Silent(), 0.0, ending=later)  # type: ignore[arg-type]


def test_the_page_needs_no_torch() -> None:
    """It is served only where asked for; what it imports must not cost every client."""
    assert "torch" not in vars(own_page)
