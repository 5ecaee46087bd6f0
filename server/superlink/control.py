"""The operator's side of a SuperLink, over its Control API: sites' keys and the state of runs.

Only a program on the server's own machine reaches this API; see `gateway`.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from fedda import flower
from fedda.errors import KeyFileError, RunError
from fedda.flower import control_pb2 as api
from fedda.flower import http_api
from fedda.ops import certificate, keys
from fedda.ops.proxies import loopback_is_direct

from .registered import RegisteredKey, write

# What Flower calls the types of settings.
SCALARS = {bool: "bool", int: "sint64", float: "double", str: "string"}

A = TypeVar("A", bound=Message)


@dataclass(frozen=True)
class ControlledSite:
    """A registered site, as the server sees it."""

    node_id: int
    name: str
    online: bool
    public_key: bytes


@dataclass(frozen=True)
class RunState:
    """How far a run is: status is pending, starting, running or finished."""

    status: str
    sub_status: str
    details: str

    @property
    def ended(self) -> bool:
        return self.status == "finished"

    @property
    def ending(self) -> str:
        """How it ended: completed, failed or stopped; empty while it goes on."""
        return self.sub_status if self.ended else ""

    def __str__(self) -> str:
        text = f"{self.status}:{self.sub_status}" if self.sub_status else self.status
        return f"{text} ({self.details})" if self.details else text


class Control:
    """A client of one SuperLink's Control API, until its `with` block ends."""

    def __init__(self, address: str, ca: Path | None) -> None:
        """Talk to host:port over TLS with the authority's certificate, or without one in HTTP."""
        self.address = address
        loopback_is_direct()
        authority = None if ca is None else certificate.pem(ca)
        self._client = http_api.client(address, "control", insecure=ca is None, authority=authority)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def sites(self) -> list[ControlledSite]:
        """Every site with a valid registration."""
        answer = self._ask("list-nodes", api.ListNodesRequest(), api.ListNodesResponse)
        return [
            ControlledSite(node.node_id, node.name, node.status == "online", node.public_key)
            for node in answer.nodes_info
            if node.status != "unregistered"
        ]

    def register(self, key: ec.EllipticCurvePublicKey, name: str) -> int:
        """Admit a key and return its node id."""
        request = api.RegisterNodeRequest(public_key=keys.pem(key), name=name)
        return self._ask("register-node", request, api.RegisterNodeResponse).node_id

    def unregister(self, node_id: int) -> None:
        """Refuse a site from now on."""
        request = api.UnregisterNodeRequest(node_id=node_id)
        self._ask("unregister-node", request, api.UnregisterNodeResponse)

    def start_run(self, app: Path, run_config: Mapping[str, Any]) -> int:
        """Start a run of the Flower app in a folder, as `flwr run` does -> Flower's id of the run.

        Args:
            app: a folder with the app's pyproject.toml.
            run_config: overrides of the app's configuration.

        Raises:
            RunError: the server refused the app or a setting.
        """
        content = flower.build_fab_from_disk(app)
        fab: Any = {"hash_str": sha256(content).hexdigest(), "content": content}
        settings: Any = {name: {SCALARS[type(value)]: value} for name, value in run_config.items()}
        request = api.StartRunRequest(fab=fab, override_config=settings)
        answer = self._ask("start-run", request, api.StartRunResponse)
        if not answer.HasField("run_id"):
            raise RunError(f"the server at {self.address} did not start the run: {answer.note}")
        return answer.run_id

    def run_state(self, run_id: int) -> RunState:
        """How far a run is."""
        request = api.ListRunsRequest(run_id=run_id)
        runs = self._ask("list-runs", request, api.ListRunsResponse).run_dict
        if run_id not in runs:
            raise RunError(f"the server at {self.address} knows no run {run_id}: list its runs")
        status = runs[run_id].status
        return RunState(status.status, status.sub_status, status.details)

    def stop_run(self, run_id: int) -> bool:
        """End a run; False if it had ended already."""
        request = api.StopRunRequest(run_id=run_id)
        return self._ask("stop-run", request, api.StopRunResponse).success

    def _ask(self, call: str, request: Any, answer: type[A]) -> A:
        try:
            return http_api.call(self._client, call, request, answer)
        except httpx.HTTPStatusError as error:
            response, text = error.response, error.response.text
            if "html" in response.headers.get("content-type", ""):
                raise self._other() from error
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a text of its own
                text = response.json()["detail"]
            raise RunError(
                f"the server at {self.address} refused (HTTP {response.status_code}): {text[:200]}"
            ) from error
        except DecodeError as error:
            raise self._other() from error
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                why = "has expired: renew it (`fedda keys renew`) and start the server again"
                if "expired" not in str(error):
                    why = (
                        "does not fit this folder's ca.crt: use the folder that the server was "
                        "started with, and start it again if the certificates were made anew"
                    )
                raise KeyFileError(
                    f"the certificate of the server at {self.address} {why}"
                ) from error
            why = f"no server answers at {self.address} ({error}): start it with `fedda superlink`"
            if isinstance(error, httpx.ReadTimeout):
                why = f"the server at {self.address} took a call but is slow to answer: try again"
            raise RunError(why) from error

    def _other(self) -> RunError:
        return RunError(
            f"no SuperLink answers at {self.address}, but another program: give the server's "
            "operator port (--admin-port of `fedda superlink`)"
        )


class Folder:
    """A folder of keys, by which a server's sites are admitted and turned away."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registered = directory / "registered.json"  # which site each node is, for runs
        self.unread: set[Path] = set()  # files that were no keys at the last look

    def sync(self, control: Control) -> list[str]:
        """Turn away keys in nodes/revoked/, admit new keys in nodes/ -> what was done, in words.

        It also notes for the programs of runs which site each node is (`registered`).

        Keys that were registered by other means stay registered. A file that is no key is reported
        once and passed over, so that it does not keep other sites from being admitted or revoked.
        """
        nodes = self.directory / "nodes"
        admitted, unread = _readable(nodes)
        turned_away, more = _readable(nodes / "revoked")
        unread |= more
        done = [f"passed over: {text}" for file, text in unread.items() if file not in self.unread]
        names = {keys.pem(key): name for name, key in admitted.items()}
        revoked = {keys.pem(key) for key in turned_away.values()} - names.keys()
        registered = {site.public_key: site for site in control.sites()}
        for pem in revoked & registered.keys():
            site = registered[pem]
            control.unregister(site.node_id)
            done.append(f"turned away {site.name or site.node_id}")
        for pem, name in sorted(names.items(), key=lambda item: item[1]):
            if pem not in registered:
                control.register(admitted[name], name)
                done.append(f"admitted {name}")
        files = {keys.pem(key): nodes / f"{name}.pub" for name, key in admitted.items()}
        about = {pem: keys.role(file) for pem, file in files.items()}
        entries = {
            site.node_id: RegisteredKey(site.name, about.get(site.public_key, ""))
            for site in control.sites()
        }
        write(self.registered, entries)
        self.unread = set(unread)
        return done


def _readable(folder: Path) -> tuple[dict[str, ec.EllipticCurvePublicKey], dict[Path, str]]:
    """The keys in a folder by file name, and for each file that is no key the reason."""
    public, unread = {}, {}
    for file in sorted(folder.glob("*.pub")):
        try:
            public[file.stem] = keys.public_key(file)
        except KeyFileError as error:
            unread[file] = str(error)
    return public, unread
