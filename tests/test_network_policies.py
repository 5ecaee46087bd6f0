"""deploy/kubernetes/: which connections its network policies let through."""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tests.rendered import FOLDERS, PORTS, Object, matches, of_kind, workloads
from tests.test_deploy import SITES


def allows(rule: Object, way: str, spaces: Mapping[str, Object], other: Any, port: int) -> bool:
    """Whether a rule lets TCP pass from or to `other`: (namespace, pod), or an address."""
    ports = rule.get("ports")
    if ports is not None and not any(p["port"] == port and p["protocol"] == "TCP" for p in ports):
        return False
    if way not in rule:
        return True
    for peer in rule[way]:
        if isinstance(other, str):
            block = peer.get("ipBlock")
            if block and ip_address(other) in ip_network(block["cidr"]):
                return True
        elif "podSelector" in peer:
            space, pod = other
            known = {**spaces[space]["metadata"]["labels"], "kubernetes.io/metadata.name": space}
            wanted = peer["namespaceSelector"]["matchLabels"]
            if wanted.items() <= known.items() and matches(peer["podSelector"]["matchLabels"], pod):
                return True
    return False


def passes(folder: str, begin: Any, end: Any, port: int) -> bool:
    """Whether the policies let `begin` open a connection to `end`."""
    spaces = {each["metadata"]["name"]: each for each in of_kind(folder, "Namespace")}
    ways = (("Egress", "egress", "to", begin, end), ("Ingress", "ingress", "from", end, begin))
    for kind, rules, way, here, there in ways:
        if isinstance(here, str):
            continue  # outside the cluster
        mine = [
            policy["spec"]
            for policy in of_kind(folder, "NetworkPolicy")
            if policy["metadata"]["namespace"] == here[0]
            and matches(policy["spec"]["podSelector"]["matchLabels"], here[1])
            and kind in policy["spec"]["policyTypes"]
        ]
        assert mine, "a pod that no policy selects may do everything"
        if not any(allows(r, way, spaces, there, port) for spec in mine for r in spec[rules]):
            return False
    return True


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_policy_selects_a_pod(folder: str) -> None:
    for policy in of_kind(folder, "NetworkPolicy"):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        space = policy["metadata"]["namespace"]
        assert [pod for s, pod in workloads(folder) if s == space and matches(labels, pod)]
    assert len(of_kind(folder, "NetworkPolicy")) == len(workloads(folder))


def test_the_demos_sites_reach_only_the_servers_two_ports() -> None:
    folder = "overlays/demo"
    pods = dict(workloads(folder))
    server = ("fedda-demo", pods.pop("fedda-demo"))
    assert len(pods) == len(SITES)
    for site in pods.items():
        for port in (*PORTS, 8000, 22):
            assert passes(folder, site, server, port) == (port in PORTS)
            assert not passes(folder, server, site, port)
            assert not passes(folder, site, "203.0.113.7", port)
            assert not passes(folder, server, "203.0.113.7", port)
            assert not passes(folder, "203.0.113.7", server, port)
            for other in pods.items():
                assert not passes(folder, site, other, port)


def test_strangers_reach_only_the_servers_two_ports() -> None:
    for folder in ("base/server", "overlays/hub"):
        (server,) = workloads(folder)
        for port in (*PORTS, 8000):
            assert passes(folder, "203.0.113.7", server, port) == (port in PORTS)
            assert not passes(folder, server, "203.0.113.7", port)


def test_a_site_reaches_the_server_and_names_only() -> None:
    (site,) = workloads("overlays/clinic-a")
    for port in (*PORTS, 443):
        assert passes("overlays/clinic-a", site, "203.0.113.7", port) == (port in PORTS)
        assert not passes("overlays/clinic-a", site, "203.0.113.8", port)
        assert not passes("overlays/clinic-a", "203.0.113.7", site, port)
    for folder in ("base/site", "overlays/clinic-a", "overlays/demo"):
        for policy in of_kind(folder, "NetworkPolicy"):
            if policy["metadata"]["name"] == "site":
                server, names = policy["spec"]["egress"]
                assert [port["port"] for port in server["ports"]] == list(PORTS)
                assert {port["port"] for port in names["ports"]} == {53}
                (to,) = names["to"]
                space, pods = to["namespaceSelector"], to["podSelector"]
                assert space["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}
                assert pods["matchLabels"] == {"k8s-app": "kube-dns"}
