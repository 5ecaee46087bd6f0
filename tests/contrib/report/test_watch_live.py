"""A run on a real server is watched to its end: in a terminal, as a page, by its events."""

import contextlib
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from tests.contrib.report.test_page import Read
from tests.federation import LIVE, Federation, Operator
from tests.patience import PATIENCE, wait_until
from tests.test_metrics import samples

WORKING = "fedda_sites_working"
ADDRESSES = ["/live", "/live/events", "/metrics"]


def client(hub: Federation, port: int) -> httpx.Client:
    trust = ssl.create_default_context(cafile=hub.ca)
    return httpx.Client(
        base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=PATIENCE, trust_env=False
    )


def first_event(operators: httpx.Client, address: str) -> str:
    with operators.stream("GET", address) as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        return next(line for line in stream.iter_lines() if line.startswith("data: "))


@pytest.mark.nightly("server/watching", "fedda/cli/watching.py", "fedda/cli/watch.py")
def test_a_run_is_watched_to_its_end(tmp_path: Path) -> None:
    """The run waits for bert in round 2 until the test lets him go on."""
    with Federation(tmp_path / "hub", acting=True) as hub, contextlib.ExitStack() as stack:
        operators = stack.enter_context(client(hub, hub.admin_port))
        sites = stack.enter_context(client(hub, hub.port))
        before = Read(operators.get("/live").text)
        assert "No run has begun" in before.words

        hub.act("bert", {"2": ["hold", 0]})
        changes = (part for k, v in LIVE.items() for part in ("-c", f"{k}={v}"))
        words = ["run", "fedavg", "--server", hub.home, "--dir", hub.runs, "--name", "r"]
        operator = Operator(hub, [*words, *changes])
        operator.wait_for("round 1/3", PATIENCE)
        watcher = Operator(hub, ["attach", hub.runs / "r"])
        watcher.wait_for("round 1/3", PATIENCE)

        def bert() -> list[str]:
            rows = Read(operators.get("/live").text).tables["Sites now"]
            return next(row for row in rows if row[0] == "bert")

        wait_until(lambda: bert()[4] == "trains", f"bert does not train: {bert()}")
        assert bert()[1:4] == ["source", "yes", "yes"]
        page = Read(operators.get("/live").text)
        assert "round 1 of 3" in page.words
        version = next(a["data-version"] for _, a in page.elements if "data-version" in a)
        assert first_event(operators, "/live/events").startswith("data: ")

        for address in ADDRESSES:
            assert sites.get(address).status_code == 403
        for address in ADDRESSES:
            assert operators.get(address, headers={"host": "evil.example"}).status_code == 421
            assert operators.post(address).status_code == 405

        left = Operator(hub, ["attach", hub.runs / "r"])
        left.wait_for("round 1/3", PATIENCE)
        left.popen.send_signal(signal.SIGINT)
        assert left.popen.wait(PATIENCE) == 130
        assert operator.alive

        def measured() -> dict[str, float]:
            found = samples(operators.get("/metrics").text)
            return {name: found[name, ()] for name in ("fedda_sites_reachable", WORKING)}

        # The other sources may take longer for round 2 than everything above.
        wait_until(lambda: measured()[WORKING] == 1, "more sites than bert still work")
        assert measured()["fedda_sites_reachable"] == 4
        assert samples(operators.get("/metrics").text)["fedda_round", (("method", "fedavg"),)] == 1

        hub.act("bert", {})
        code = watcher.popen.wait(PATIENCE)
        assert code == 0, f"{code}: {watcher.text()[-600:]}"
        assert "round 3/3" in watcher.text()
        assert all(c.isprintable() or c == "\n" for c in watcher.text())
        assert operator.popen.wait(PATIENCE) == 0, operator.text()
        assert first_event(operators, f"/live/events?seen={version}") != f"data: {version}"
        after = Read(operators.get("/live").text)
        assert "The run has finished." in after.words
        console, log = hub.processes["superlink"], hub.home / "superlink.log"
        console.wait_for("run r has finished", PATIENCE)
        said = console.text()
        assert "site bert joined" in said and "run r (fedavg) begins" in said
        assert len(said.splitlines()) < 30, said
        assert "fedda.server" in log.read_text() or "INFO" in log.read_text()
        assert log.stat().st_mode & 0o777 == 0o600
