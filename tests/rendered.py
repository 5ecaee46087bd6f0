"""What deploy/kubernetes/ renders to, by `kubectl kustomize` or `kustomize build`.

Where neither is installed, tests that ask for it are skipped.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1] / "deploy" / "kubernetes"
FOLDERS = ("base/server", "base/site", "overlays/hub", "overlays/clinic-a", "overlays/demo")
PORTS = (8443,)
Object = dict[str, Any]


@cache
def rendered(folder: str) -> tuple[Object, ...]:
    """Every object of a folder, as `kubectl apply -k` would send it."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run(
        [*command, str(ROOT / folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(folder: str, kind: str) -> list[Object]:
    return [each for each in rendered(folder) if each["kind"] == kind]


def find(folder: str, kind: str, namespace: str, name: str) -> Object:
    (found,) = [
        each
        for each in of_kind(folder, kind)
        if (each["metadata"]["namespace"], each["metadata"]["name"]) == (namespace, name)
    ]
    return found


def workloads(folder: str) -> list[tuple[str, Object]]:
    """The namespace and pod of each workload."""
    kinds = ("StatefulSet", "Deployment", "DaemonSet", "Job", "CronJob", "Pod", "ReplicaSet")
    made = [each for each in rendered(folder) if each["kind"] in kinds]
    assert {each["kind"] for each in made} == {"StatefulSet"}
    return [(each["metadata"]["namespace"], each["spec"]["template"]) for each in made]


def containers(folder: str) -> Iterator[tuple[str, Object, Object]]:
    """Every container with its namespace and pod."""
    for namespace, pod in workloads(folder):
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield namespace, pod, each


def settings(folder: str, namespace: str, container: Object) -> dict[str, str]:
    """The container's environment."""
    found = {"NAMESPACE": namespace, "OMP_NUM_THREADS": "1"}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        found |= find(folder, "ConfigMap", namespace, name)["data"]
    return found


def words(folder: str, namespace: str, container: Object) -> list[str]:
    """The command line, with $(NAME) replaced as Kubernetes does."""
    env = settings(folder, namespace, container)
    given = [*container["command"], *container.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], word) for word in given]


def matches(labels: Mapping[str, str], pod: Object) -> bool:
    return labels.items() <= pod["metadata"]["labels"].items()
