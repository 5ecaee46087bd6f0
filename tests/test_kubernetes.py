"""deploy/kubernetes/: what it renders to fits the API, and its pods are confined.

Checked against the schemas of the Kubernetes API. None of it runs on a cluster.
"""

import kubernetes_validate
import pytest

from tests.rendered import FOLDERS, PORTS, containers, find, matches, of_kind, rendered, workloads

VERSIONS = ("1.29", "1.37")  # the oldest that README names, and the newest known


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_objects_fit_the_api(folder: str, version: str) -> None:
    assert len(rendered(folder)) >= 5
    for each in rendered(folder):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_selectors_names_and_volumes_are_those_that_exist(folder: str) -> None:
    spaces = {each["metadata"]["name"] for each in of_kind(folder, "Namespace")}
    for each in rendered(folder):
        assert each["kind"] in ("Namespace", "PersistentVolume") or (
            each["metadata"]["namespace"] in spaces
        )
    for each in of_kind(folder, "StatefulSet"):
        space, spec = each["metadata"]["namespace"], each["spec"]
        pod = spec["template"]
        assert spec["selector"]["matchLabels"] == pod["metadata"]["labels"]
        assert spec["replicas"] == 1
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        mounted = set()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            names = [mount["name"] for mount in container["volumeMounts"]]
            assert set(names) <= volumes.keys() | claimed
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            mounted |= set(names)
            for source in container.get("envFrom", ()):
                find(folder, "ConfigMap", space, source["configMapRef"]["name"])
        assert mounted == volumes.keys() | claimed  # nothing is defined in vain
        for volume in volumes.values():
            if "configMap" in volume:
                find(folder, "ConfigMap", space, volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                name = volume["persistentVolumeClaim"]["claimName"]
                find(folder, "PersistentVolumeClaim", space, name)
            if "secret" in volume:
                assert volume["secret"] == {"secretName": "keys", "defaultMode": 0o440}


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_are_confined_as_in_the_compose_files(folder: str) -> None:
    for space in of_kind(folder, "Namespace"):
        labels = space["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for _, pod in workloads(folder):
        spec = pod["spec"]
        for host in ("hostNetwork", "hostPID", "hostIPC"):
            assert host not in spec
        assert spec["automountServiceAccountToken"] is False
        assert spec["terminationGracePeriodSeconds"] == 30
        confined = spec["securityContext"]
        assert confined["runAsNonRoot"] is True
        assert confined["runAsUser"] == confined["runAsGroup"] == 10001  # the image's user
        assert confined["seccompProfile"] == {"type": "RuntimeDefault"}
        assert confined["fsGroupChangePolicy"] == "OnRootMismatch"
    for _, pod, container in containers(folder):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert not [port for port in container.get("ports", ()) if "hostPort" in port]
        (tmp,) = [v for v in pod["spec"]["volumes"] if v["name"] == "tmp"]
        assert tmp["emptyDir"]["medium"] == "Memory"  # as tmpfs in the compose files


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_the_public_ports_have_a_service(folder: str) -> None:
    pods = workloads(folder)
    for each in of_kind(folder, "Service"):
        ports = {port["name"]: port["port"] for port in each["spec"]["ports"]}
        assert sorted(ports.values()) == list(PORTS)
        (pod,) = [
            pod
            for space, pod in pods
            if space == each["metadata"]["namespace"] and matches(each["spec"]["selector"], pod)
        ]
        (server,) = pod["spec"]["containers"]
        assert {port["name"]: port["containerPort"] for port in server["ports"]} == ports
        assert [port["targetPort"] for port in each["spec"]["ports"]] == list(ports)
        public = each["spec"].get("type", "ClusterIP") != "ClusterIP"
        assert public == (folder == "overlays/hub")
    assert len(of_kind(folder, "Service")) == ("site" not in folder and "clinic" not in folder)
    assert not [e for e in rendered(folder) if e["kind"] in ("Ingress", "Gateway", "TLSRoute")]
    sites = [c for _, pod, c in containers(folder) if "site" in str(pod["metadata"]["labels"])]
    assert not [site for site in sites if "ports" in site]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_network_policies_leave_one_port_and_the_names(folder: str) -> None:
    """Each pod has a policy for both ways: a site only dials, the server is only dialled."""
    policies = of_kind(folder, "NetworkPolicy")
    assert len(policies) == len(workloads(folder))
    (port,) = PORTS
    public, names = [{"protocol": "TCP", "port": port}], {"k8s-app": "kube-dns"}
    for policy in policies:
        space, spec = policy["metadata"]["namespace"], policy["spec"]
        labels = spec["podSelector"]["matchLabels"]
        assert [pod for s, pod in workloads(folder) if s == space and matches(labels, pod)]
        assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
        if policy["metadata"]["name"] == "server":
            assert spec["egress"] == [] and [r["ports"] for r in spec["ingress"]] == [public]
            continue
        (server, dns), none = spec["egress"], spec["ingress"]
        assert none == [] and server["ports"] == public and len(server["to"]) == 1
        assert {each["port"] for each in dns["ports"]} == {53}
        assert [to["podSelector"]["matchLabels"] for to in dns["to"]] == [names]
