"""deploy/kubernetes/: its commands and keys are those of the compose files."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedda.ops import certificate, keys
from tests.command_lines import parse
from tests.rendered import FOLDERS, ROOT, Object, words, workloads
from tests.test_deploy import SITES, apart_from, services
from tests.test_packaging import tree


def mounts(container: Object) -> dict[Path, bool]:
    """Where volumes are mounted, and whether read-only."""
    return {Path(m["mountPath"]): m.get("readOnly", False) for m in container["volumeMounts"]}


def read_only(path: Path, container: Object) -> bool:
    """Whether a path lies on a volume that is mounted read-only; it must lie on one."""
    (found,) = [only for mount, only in mounts(container).items() if path.is_relative_to(mount)]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_are_accepted_and_are_those_of_compose(folder: str) -> None:
    compose = {
        "fedda": services("compose.server.yml")["server"]["command"],
        "fedda-client": services("compose.client.yml")["client"]["command"],
    }
    moved = {"superlink", "role", "name", "ca", "key", "device", "peers", "policy"}
    for space, pod in workloads(folder):
        (container,) = pod["spec"]["containers"]
        line = words(folder, space, container)
        params, like = parse(line), parse(compose[line[0]])
        own = moved if line[0] == "fedda-client" else set()
        assert apart_from(own, params) == apart_from(own, like)
        for name, given in params.items():
            if isinstance(given, Path):
                writable = name in ("directory", "traffic", "state_dir")
                assert read_only(given, container) is not writable, name
        if line[0] == "fedda-client":
            assert params["superlink"].endswith(":8443")
            assert (params["policy"], params["peers"]) == (
                Path("/policy/policy.toml") if folder == "overlays/clinic-a" else None,
                Path("/keys/peers") if folder == "overlays/demo" else None,
            )


KUBECTL = """#!/bin/sh
# Stands in for kubectl: runs a command of the server's pod here, and keeps secrets in folders.
set -eu
[ "$1 $2 $3" = "create secret generic" ] && {
  folder="$ROOT/secrets/$6/$4"; mkdir -p "$folder"; shift 6
  for file in "$@"; do cp "${file#--from-file=}" "$folder/"; done; exit
}
[ "$1 $2" = "get secret" ] && { test -d "$ROOT/secrets/$5/$3"; exit; }
[ "$1 $2 $3 $4 $5 $6 $7" = "exec --namespace fedda-demo server-0 --container server --" ]
shift 7
for word in "$@"; do
  shift
  case "$word" in /hub*) word="$ROOT$word";; esac
  set -- "$@" "$word"
done
[ "$1" = fedda ] && { shift; set -- "$PYTHON" -m fedda "$@"; }
exec "$@"
"""


@pytest.mark.nightly("deploy/kubernetes", "fedda/ops/keys.py")
def test_the_demos_keys_reach_each_site_and_leave_the_server(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(KUBECTL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tool.parent}:{os.environ['PATH']}"
    env = os.environ | {"ROOT": str(tmp_path), "PYTHON": sys.executable, "PATH": path}
    certificate.init(tmp_path / "hub", ["server.fedda-demo.svc"])

    def run() -> dict[str, bytes]:
        script = ["sh", str(ROOT / "overlays" / "demo" / "keys.sh")]
        done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return tree(tmp_path / "secrets")

    made = run()
    files = ("ca.crt", "key", "peers")
    assert set(made) == {f"fedda-demo-{name}/keys/{file}" for name in SITES for file in files}
    assert keys.names(tmp_path / "hub") == sorted(SITES)
    assert not [name for name in SITES if (tmp_path / "hub" / "nodes" / name).exists()]
    for name in SITES:
        folder = tmp_path / "secrets" / f"fedda-demo-{name}" / "keys"
        own = keys.load_node_key(folder / "key").public_key()
        registered = tmp_path / "hub" / "nodes" / f"{name}.pub"
        assert keys.public_key(registered) == own
        assert keys.role(registered) == ("target" if name == "fonts" else "source")
        assert len((folder / "peers").read_text().splitlines()) == len(SITES)
        certificate.check_certificate(folder / "ca.crt")
    assert run() == made
