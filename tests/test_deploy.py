"""deploy/: the programs accept its commands, and only two ports are open."""

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from clients.node.standing import Standing
from clients.policy.rules import Leaving, Policy
from fedda.errors import KeyFileError
from fedda.ops import certificate
from fedda.ops import keys as keys_of
from fedda.ops.federation import Deployment
from fedda.ops.spawn import LOOPBACK, Reserved
from tests.command_lines import blocks, command_lines, parse

DEPLOY = Path(__file__).parents[1] / "deploy"
FILES = ("compose.demo.yml", "compose.server.yml", "compose.client.yml", "compose.gpu.yml")
SITES = ("handwritten", "blended", "street", "fonts")
SITE_FILES = ("ca.crt", "key", "peers", "policy.toml")
PUBLIC_PORT = 8443
# An internal network reaches no other; without an address on the bridge not the host either.
ALONE = {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}
ENV = {"HUB": "/srv/hub", "RUNS": "/srv/runs", "HOST": "hub.example.org", "ROLE": "target"}
ENV |= {"NAME": "clinic-a", "DATA": "/data/scans", "CA": "/etc/fedda/ca.crt"}
ENV |= {"KEY": "/etc/fedda/key"}


def substitute(text: str, env: Mapping[str, str] = ENV) -> str:
    """Replace ${NAME}, ${NAME:-default}, ${NAME:-${OTHER}} and ${NAME:?message} as compose does."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return env[name] if default is None else env.get(name, substitute(default, env))

    default = r"(?:\$\{\w+\}|[^}])*"
    return re.sub(rf"\$\{{(?P<name>\w+)(?::-(?P<default>{default})|:\?[^}}]*)?\}}", value, text)


def services(file: str, env: Mapping[str, str] = ENV) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(substitute((DEPLOY / file).read_text(), env))["services"]


def script(name: str) -> ModuleType:
    """Load a program of deploy/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", DEPLOY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The file for GPUs extends a service of another file. Those that run no fedda have tests below.
OTHERS = ("init", "state", "gate")
COMMANDS = [(f, n) for f in FILES[:3] for n in services(f) if n not in OTHERS]
LASTING = [(f, n) for f, n in COMMANDS if n != "keys"]


@pytest.mark.parametrize(("file", "name"), COMMANDS)
def test_commands_are_accepted(file: str, name: str) -> None:
    service = services(file)[name]
    words = [*service.get("entrypoint", []), *service["command"]]
    params = parse(words)
    mounts = targets(service)
    for given in params.values():
        if isinstance(given, Path):
            assert any(given.is_relative_to(mount) for mount in mounts), f"{given} is not mounted"
    if words[0] == "fedda-client":
        assert not params["insecure"]
        assert not params["stock"]
        for given in map(params.get, ("ca", "key", "data", "peers", "policy")):
            if given is None:
                continue  # only the demo's sites have their peers' keys and a policy
            assert mounts[covering(given, mounts)], f"{given} is writable"
        assert not mounts[covering(params["state_dir"], mounts)]
        assert params["superlink"].endswith(f":{PUBLIC_PORT}")
    elif words[1] == "superlink":
        assert (params["host"], params["port"]) == ("0.0.0.0", PUBLIC_PORT)
        assert not params["insecure"]


def apart_from(moved: Iterable[str], params: Mapping[str, Any]) -> dict[str, Any]:
    """A command's parameters, without those that every way to start it gives in its own way."""
    return {name: given for name, given in params.items() if name not in moved}


def targets(service: dict[str, Any]) -> dict[Path, bool]:
    """Return where volumes are mounted, and whether read-only."""
    mounts = {}
    for volume in service.get("volumes", []):
        if isinstance(volume, str):
            _, target, *mode = volume.split(":")
            mounts[Path(target)] = mode == ["ro"]
        else:
            mounts[Path(volume["target"])] = volume.get("read_only", False)
    return mounts


def covering(path: Path, mounts: dict[Path, bool]) -> Path:
    return next(mount for mount in mounts if path.is_relative_to(mount))


IN_PROSE = {"README.md": 28, "compose.demo.yml": 1, "compose.server.yml": 1}
IN_PROSE |= {"demo-init.sh": 4, "smoke.sh": 8}


@pytest.mark.contrib
@pytest.mark.parametrize(("file", "count"), IN_PROSE.items())
def test_commands_in_prose_are_accepted(file: str, count: int) -> None:
    text = (DEPLOY / file).read_text()
    found = list(command_lines(blocks(text) if file.endswith(".md") else text))
    assert len(found) == count, found
    for words in found:
        parse(words)


def test_only_the_public_port_is_published() -> None:
    published = {
        (file, name): service["ports"]
        for file in FILES
        for name, service in services(file).items()
        if "ports" in service or "expose" in service or service.get("network_mode") == "host"
    }
    assert published == {("compose.server.yml", "server"): ["8443:8443"]}


def test_demo_sites_reach_only_the_server() -> None:
    demo = yaml.safe_load((DEPLOY / "compose.demo.yml").read_text())
    assert demo["networks"] == dict.fromkeys(SITES, ALONE)
    assert demo["services"]["server"]["networks"] == list(SITES)
    assert demo["services"]["init"]["network_mode"] == "none"
    roles = {}
    for name in SITES:
        site = demo["services"][name]
        assert site["networks"] == [name]
        assert set(site["volumes"]) == {f"{name}:/site:ro", f"{name}-state:/state"}
        params = parse(site["command"])
        assert params["name"] == name
        assert params["peers"] == Path("/site/peers")
        assert params["policy"] == Path("/site/policy.toml")
        roles[name] = params["role"]
    assert sorted(roles.values()) == ["source", "source", "source", "target"]
    assert roles["fonts"] == "target"


@pytest.mark.parametrize(("file", "name"), LASTING)
def test_lasting_services_are_confined_and_watched(file: str, name: str) -> None:
    service = services(file)[name]
    assert service["init"] is True
    assert service["restart"] == "always"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert not str(service.get("user", "10001")).startswith("0")
    kind, python, script, address, ca, *state = service["healthcheck"]["test"]
    assert (kind, python, script) == ("CMD", "python", "/opt/fedda/health.py")
    assert re.fullmatch(rf"https://[\w.]+:{PUBLIC_PORT}", address)
    assert Path(ca).name == "ca.crt"
    assert any(Path(ca).is_relative_to(mount) for mount in targets(service))
    # A site's check also reads whether the server took the site.
    command = service["command"]
    kept = parse(command)["state_dir"] if command[0] == "fedda-client" else None
    assert [Path(folder) for folder in state] == ([kept] if kept else [])
    # Until then nothing is wrong: four sites that begin at once load PyTorch for half a minute.
    assert service["healthcheck"]["start_period"] == "120s"


def test_image_contains_what_the_compose_files_use() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    for names in copied:
        if not names[0].startswith("--from"):
            for source in names[:-1]:
                here = source.replace("$TORCH_LOCK", "torch.lock")
                assert (DEPLOY.parent / here).exists(), source
    assert ["deploy/health.py", "deploy/gate.py", "/opt/fedda/"] in copied
    assert "USER 10001:10001" in lines
    # No folder is writable for another user than the image's own.
    assert "RUN install -d -m 0700 -o 10001 -g 10001 /hub /runs /state" in lines
    assert "1777" not in "".join(lines)
    froms = [line for line in lines if line.startswith("FROM ")]
    bases = {line.split()[1] for line in froms}
    assert bases == {"$BASE", "packages", "installed"}  # a build may give a digest


@pytest.mark.parametrize("user", ["10001:10001", "1000:1000"])
def test_a_sites_state_is_its_users_alone(user: str) -> None:
    env = ENV if user == "10001:10001" else ENV | {"RUN_AS": user}
    made = services("compose.client.yml", env)
    assert made["client"]["user"] == user
    assert made["state"]["command"][-1] == f"chmod 0700 /state && chown -R {user} /state"
    assert (
        made["state"]["volumes"] == ["state:/state"] and "state:/state" in made["client"]["volumes"]
    )
    # Root may do this and no more, and the client waits for it.
    assert (made["state"]["user"], made["state"]["network_mode"]) == ("0:0", "none")
    assert made["state"]["cap_drop"] == ["ALL"]
    waits = made["client"]["depends_on"]["state"]
    assert waits == {"condition": "service_completed_successfully"}


def test_a_site_has_no_way_out_but_its_gate() -> None:
    file = yaml.safe_load(substitute((DEPLOY / "compose.client.yml").read_text()))
    made = file["services"]
    assert made["client"]["networks"] == ["inside"]
    assert made["gate"]["networks"] == ["inside", "outside"]
    assert file["networks"]["inside"] == ALONE
    # The client dials the server by its name, which its certificate has, and meets the gate.
    assert made["client"]["links"] == ["gate:hub.example.org"]
    forward = ["python", "/opt/fedda/gate.py"]
    assert made["gate"]["command"] == [*forward, "hub.example.org", str(PUBLIC_PORT)]
    assert made["gate"]["cap_drop"] == ["ALL"] and made["gate"]["read_only"] is True
    env = ENV | {"ADDRESS": "192.0.2.7", "PORT": "443"}
    other = services("compose.client.yml", env)
    assert other["gate"]["command"] == [*forward, "192.0.2.7", "443"]


def test_the_gate_passes_on_what_comes_and_its_end() -> None:
    gate = script("gate")

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async def say(port: int, words: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(words)
        writer.write_eof()
        heard = await reader.read()
        writer.close()
        return heard

    async def through(nobody: int) -> tuple[bytes, bytes]:
        async with await asyncio.start_server(upper, LOOPBACK, 0) as server:
            port = server.sockets[0].getsockname()[1]
            heard = await pass_through(port, b"words" * 100_000)
        return heard, await pass_through(nobody, b"")

    async def pass_through(port: int, words: bytes) -> bytes:
        meet = partial(gate.meet, LOOPBACK, port)
        async with await asyncio.start_server(meet, LOOPBACK, 0) as door:
            return await say(door.sockets[0].getsockname()[1], words)

    with Reserved() as nobody:
        heard, none = asyncio.run(through(nobody.port))
    assert heard == b"WORDS" * 100_000
    assert none == b""  # the connection ends


def test_a_release_asks_for_holes_in_all_that_the_image_installs() -> None:
    """Of what Flower decides at the public port, too, and every night."""
    root, holes = DEPLOY.parent, script("holes")
    lock = (DEPLOY / "requirements.lock").read_text()
    assert set(holes.PUBLIC) == {"fastapi", "starlette", "uvicorn", "flwr"}
    assert all(re.search(rf"^{name}==", lock, re.MULTILINE) for name in holes.PUBLIC)
    assert set(holes.LOCKS) == {path.name for path in DEPLOY.glob("*.lock")}
    assert "deploy/holes.py" in (root / "Makefile").read_text()
    for workflow in ("release", "nightly"):
        text = (root / ".github" / "workflows" / f"{workflow}.yml").read_text()
        assert "- run: make audit" in text and "continue-on-error" not in text


GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD = GOOD | {"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
UNKNOWN = {"name": "b", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([GOOD], 0, "No known hole in 1 packages."),
        ([BAD, UNKNOWN], 1, "Known holes, 1 in all: CVE-1 in a 1 (mended in 2)."),
        ([GOOD, UNKNOWN], 2, "did not answer for 1 of 2 packages"),
        ([], 2, "did not answer"),
    ],
)
def test_a_service_that_does_not_answer_is_no_sign_that_there_are_no_holes(
    packages: list[dict[str, Any]], code: int, said: str
) -> None:
    ends, sentence = script("holes").judged(packages)
    assert ends == code and said in sentence and "\n" not in sentence


def pins(lock: str) -> dict[str, set[str]]:
    """The versions of a lock; each has to have a hash."""
    text = (DEPLOY / lock).read_text().replace("\\\n", " ")
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        assert "--hash=sha256:" in line, line
        pinned = Requirement(line.partition(" --hash")[0])
        (one,) = pinned.specifier
        assert one.operator == "==", line
        found.setdefault(canonicalize_name(pinned.name), set()).add(one.version)
    return found


def test_the_locks_have_a_hashed_version_of_everything_that_is_installed() -> None:
    """Renew them with `make lock`."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    rest, torch, tools = map(pins, ("requirements.lock", "torch.lock", "tools.lock"))
    assert {"torch", "torchvision"} <= torch.keys() and not rest.keys() & torch.keys()
    assert {"build", "cyclonedx-bom", "pip-audit", "setuptools"} <= tools.keys()
    for line in (*project["project"]["dependencies"], *project["build-system"]["requires"]):
        wanted = Requirement(line)
        versions = (rest | torch)[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(v, prereleases=True) for v in versions), line
    # They are of the index that torch is of, and come with it.
    assert [n for n in rest if n.startswith(("nvidia", "cuda", "triton"))] == []


def test_nothing_is_installed_without_hashes_in_the_image_or_a_release() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (setting,) = re.findall(r"^ARG (PIP_.*)$", dockerfile, re.MULTILINE)
    assert {"PIP_REQUIRE_HASHES=1", "PIP_NO_DEPS=1"} <= set(setting.split())
    assert "\nENV PIP" not in dockerfile  # an image on top of this one installs as it likes
    runs = re.findall(r"^RUN .*", dockerfile.replace("\\\n", " "), re.MULTILINE)
    pips = [line for line in runs if re.search(r"pip (install|wheel) ", line)]
    own, rest = ([p for p in pips if ("PIP_REQUIRE_HASHES=0" in p) is yes] for yes in (True, False))
    assert len(own) == 2 and all("--no-index" in line for line in own)  # fedda itself
    files = [line.split("/")[-1].strip('"') for line in rest]
    assert files == ["requirements.lock", "$TORCH_LOCK", "tools.lock"]
    release = (DEPLOY.parent / ".github" / "workflows" / "release.yml").read_text()
    for line in re.findall(r"pip install .*", release):
        assert line == "pip install --require-hashes --no-deps -r deploy/tools.lock"
    builds = re.findall(r"python -m build .*", release)
    assert len(builds) == 3 and all("--no-isolation" in line for line in builds)


@pytest.mark.parametrize("file", FILES[:3])
def test_docker_compose_accepts_the_file(file: str) -> None:
    def compose(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", *words]
        env = os.environ | ENV
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    if shutil.which("docker") is None or compose("version").returncode != 0:
        pytest.skip("docker compose is not installed")
    over = ["-f", str(DEPLOY / "compose.gpu.yml")] if file == "compose.client.yml" else []
    done = compose("-f", str(DEPLOY / file), *over, "config", "--quiet")
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly("deploy", "fedda/cli/keys.py", "fedda/ops/keys.py")
def test_demo_init_makes_everything_once(tmp_path: Path) -> None:
    script = (DEPLOY / "demo-init.sh").read_text()
    for name in ("hub", "sites", "tmp/digits"):
        script = re.sub(rf"(?<![\w.$])/{name}(?=[/\s\"])", str(tmp_path / name), script)
    script = re.sub(r"^chown .*", "", script, flags=re.MULTILINE)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run() -> dict[str, bytes]:
        subprocess.run(["sh", "-c", script], env=env, check=True, timeout=120, capture_output=True)
        made = [p for root in ("hub", "sites") for p in (tmp_path / root).rglob("*") if p.is_file()]
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in made}

    first = run()
    expected = {f"sites/{name}/{file}" for name in SITES for file in SITE_FILES}
    expected |= {f"sites/{name}/data/data.npz" for name in SITES}
    expected |= {f"hub/nodes/{name}.pub" for name in SITES}
    own = ("ca.crt", "ca.key", "server.pem", "server.key", "peers")
    expected |= {f"hub/{file}" for file in own}
    assert set(first) == expected
    again = run()
    assert set(again) == expected
    keys = [name for name in expected if not name.endswith(".npz")]
    assert {name: again[name] for name in keys} == {name: first[name] for name in keys}
    for name in SITES:
        peers = keys_of.peers(tmp_path / "sites" / name / "peers")
        assert sorted(peers) == sorted(set(SITES) - {"fonts"})  # those that may be sources
        assert first[f"sites/{name}/peers"] == first["hub/peers"]
        policy = Policy.read(tmp_path / "sites" / name / "policy.toml")
        assert policy == Policy(leaving=Leaving(look=True))  # else as without a policy


@pytest.mark.slow
def test_health_check_fails_unless_the_right_server_is_up(tmp_path: Path) -> None:
    def check(port: int, ca: Path, *state: Path) -> str:
        command = [sys.executable, str(DEPLOY / "health.py"), f"https://{LOOPBACK}:{port}", str(ca)]
        command += map(str, state)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) == (not done.stderr)
        return done.stderr

    with Deployment(tmp_path, {}) as deployment:
        assert deployment.ca is not None
        assert check(deployment.port, deployment.ca) == ""
        with Reserved() as nobody:
            assert "cannot be reached" in check(nobody.port, deployment.ca)
        missing = check(deployment.port, tmp_path / "none.crt")
        assert "none.crt cannot be read" in missing and "No such file" in missing

        site = tmp_path / "site"
        site.mkdir()
        assert "has not started yet" in check(deployment.port, deployment.ca, site)
        standing = Standing(site)
        standing.tell("connected", "to hub:8443 as node 7")
        standing.tell("work", "train for run 1")
        assert check(deployment.port, deployment.ca, site) == ""
        standing.tell("refused", "a message of node 5, not of the server")
        assert check(deployment.port, deployment.ca, site) == ""
        standing.tell("waiting", "for hub:8443, which does not know this key (yet)")
        waiting = check(deployment.port, deployment.ca, site)
        assert waiting.endswith("(waiting: for hub:8443, which does not know this key (yet))\n")
        with pytest.raises(KeyFileError), standing.until_it_fails():
            raise KeyFileError("hub:8443 does not accept this site's key")
        refused = check(deployment.port, deployment.ca, site)
        assert refused.endswith(
            "has not joined (refused: hub:8443 does not accept this site's key)\n"
        )
        certificate.init(tmp_path / "other")
        other = tmp_path / "other" / "ca.crt"
        assert "certificate verify failed" in check(deployment.port, other)
