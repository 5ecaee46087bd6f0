"""`fedda superlink`: the server that sites dial; operators reach it on this machine only."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.launch import ABOUT
from fedda.errors import KeyFileError, typed
from fedda.files import put
from fedda.halves import load
from fedda.ops import certificate
from fedda.ops.address import Address
from fedda.ops.address import host as read_host
from fedda.ops.flwr_home import write_connection
from fedda.ops.lock import only_server
from fedda.ops.log_redirect import aside
from fedda.ops.spawn import watch_parent
from fedda.results.escaping import echo

LOG = "superlink.log"

if TYPE_CHECKING:
    from server.superlink.gateway import GatewaySettings


def superlink(
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", file_okay=False)] = Path(
        "fedda-server"
    ),
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8443,
    admin_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    database: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None,
    traffic: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None,
    connections: Annotated[int, typer.Option(min=1)] = 4096,
    address_connections: Annotated[int | None, typer.Option(min=1)] = None,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
    verbose: Annotated[bool, typer.Option("--verbose")] = False,
    reserved: Annotated[bool, typer.Option("--reserved", hidden=True)] = False,
    any_app: Annotated[bool, typer.Option("--any-app", hidden=True)] = False,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
    old: Annotated[str, typer.Option("--exchange-port", "--exchange-host", hidden=True)] = "",
) -> None:
    """Start the server: sites get the Fleet API only, over TLS and with a registered key.

      fedda keys init --dir hub --host hub.example.org

      fedda keys sign clinic-a.pub --dir hub

      fedda superlink --dir hub --host 0.0.0.0

    The operator's part (starting runs, listing sites) answers on 127.0.0.1 only, and on Linux only
    the account that runs the server, and root, as it asks for no password. It runs no other app
    than this fedda. `FLWR_HOME=hub/flwr flwr run APP fedda` uses it. A browser shows the newest run
    at /live there.

    A firewall has to let sites in at --port, and nowhere else.

    Options:
        directory: Folder with the certificates and sites' keys.
        host: Address to listen on for sites; 0.0.0.0: every interface.
        port: Port that sites dial.
        admin_port: Port for the operator, on 127.0.0.1 only.
        database: Keep runs and messages over a restart, in this file. It also holds models in
            transit, unencrypted: use an encrypted volume. Default: in memory.
        traffic: Write requests and bytes per route as JSON.
        connections: Sites' connections in all, as far as the system's limit of open files allows.
        address_connections: Connections from one address. A site needs up to 10: raise this if many
            sites come from one address, as behind a load balancer. Default: 256, or a quarter of
            all if that is less.
        insecure: No TLS, no keys: for development on one machine only.
        verbose: Show here, too, what Flower writes to DIR/superlink.log.
    """
    if parent_pid is not None:
        watch_parent(parent_pid)
    if old:
        echo("note: the exchange has no port of its own any more: leave its option out", err=True)
    public = Address(read_host(host), port)
    directory = directory.absolute()
    gateway, control = load("server", "superlink.gateway"), load("server", "superlink.control")
    folder = control.Folder(directory)
    settings: GatewaySettings = gateway.GatewaySettings(
        host=public.host,
        port=port,
        admin_port=admin_port,
        database=None if database is None else database.absolute(),
        traffic=None if traffic is None else traffic.absolute(),
        tls=None if insecure else gateway.Tls(*_certificates(directory)),
        registered=None if insecure else folder.registered,
        limits=gateway.ListenerLimits(connections, address_connections),
        reserved=reserved,
        any_app=any_app,
    )
    ca = None if insecure else directory / "ca.crt"
    admin = f"127.0.0.1:{admin_port}"
    home = directory / "flwr"
    os.environ["FLWR_HOME"] = str(home)
    seen: list[tuple[str, int]] = []
    unsaid = True
    # Made once: a key is revoked also after another authority was put into the folder.
    client = control.Control(admin, ca)

    def every() -> None:
        """Admit and revoke sites whenever the files in DIR/nodes have changed."""
        nonlocal unsaid
        if insecure:
            return
        try:
            files = (directory / "nodes").rglob("*.pub")
            public_keys = sorted((str(file), file.stat().st_mtime_ns) for file in files)
            if public_keys == seen:
                return
            for line in folder.sync(client):
                say(line)
            unsaid = True
            # Read again next time: a file that was no key may be a half-copied one.
            seen[:] = [] if folder.unread else public_keys
        except Exception as error:
            # A half-copied key file must not end a server that sites depend on.
            if unsaid:
                say(f"changes of the keys in {directory}/nodes cannot be applied: {error}")
            unsaid = False

    def ready() -> None:
        write_connection(home, admin, ca)
        about = {"public": str(public), "admin": admin, "ca": ca and str(ca)}
        put(directory / ABOUT, json.dumps(about))
        trust = "no TLS, no keys" if ca is None else f"sites need {ca}"
        say(f"ready: sites dial {public}; operators {admin} ({trust})")

    with only_server(directory), client, aside(directory / LOG, also=verbose) as say:
        try:
            gateway.run(settings, every, ready, say)
        finally:
            (directory / ABOUT).unlink(missing_ok=True)
    echo("stopped")


def _certificates(directory: Path) -> tuple[Path, Path, Path]:
    ca, pem, key = (directory / name for name in ("ca.crt", "server.pem", "server.key"))
    if not pem.exists():
        init = typed("fedda", "keys", "init", "--dir", directory, "--host", "NAME")
        renew = typed("fedda", "keys", "renew", "--dir", directory, "--host", "NAME")
        raise KeyFileError(
            f"{directory} holds no certificate: make one with "
            f"`{renew if ca.exists() else init}`, or give "
            "--insecure for development on one machine"
        )
    warnings = certificate.check_certificate(pem, key), certificate.check_server(pem, ca)
    for warning in filter(None, (*warnings, certificate.opened(key))):
        echo(f"warning: {warning}", err=True)
    return ca, pem, key
