"""`fedda keys`: make the server's certificate; make, admit and revoke sites' keys."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedda.cli.exits import clear_exit
from fedda.errors import KeyFileError
from fedda.ops import keys
from fedda.results.plainly import echo

app = typer.Typer(
    no_args_is_help=True,
    help="""Make the server's certificate and every site's key.

    These commands change a folder and need no network. `fedda superlink --dir DIR` admits the sites
    whose public key lies in DIR/nodes; while it runs, it follows changes within two seconds.

      fedda keys init --dir hub --host hub.example.org

      fedda keys add clinic-a --dir hub       (hand hub/ca.crt and hub/nodes/clinic-a to clinic A)

    A site takes part under its key's name only, here clinic-a. hub/peers has all public keys: sites
    that hide models from the server (secure=sum, kd3a.relay=sealed) need it, by a way that is not
    the server's.

      fedda keys revoke clinic-a --dir hub    (clinic A is turned away from now on)
    """,
)

Dir = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="The server's folder.", file_okay=False)
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="A host name or address that sites use for the server; repeat it for several. "
        "localhost and 127.0.0.1 are always included.",
    ),
]
HERE = Path("fedda-server")


@app.command()
def init(directory: Dir = HERE, host: Hosts = None) -> None:
    """Make a new authority and the server's certificate."""
    with clear_exit():
        keys.init(directory, host or ())
    echo(f"{directory / 'ca.crt'}: give it to every site")
    echo(f"{directory / 'server.pem'}: the server's certificate, {keys.SERVER_DAYS} days")


@app.command()
def renew(directory: Dir = HERE, host: Hosts = None) -> None:
    """Make a new server certificate with the same authority; sites need no new files."""
    with clear_exit():
        keys.renew(directory, host or ())
    echo(f"{directory / 'server.pem'}: renewed; restart the server to use it")


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site.")],
    directory: Dir = HERE,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="A public key that the site made itself (`ssh-keygen -t ecdsa -b 384`), so that "
            "its private key never leaves it. Without this option the key pair is made here.",
        ),
    ] = None,
    role: Annotated[
        Literal["source", "target"] | None,
        typer.Option(help="The only role that the site may play. Default: either."),
    ] = None,
) -> None:
    """Admit a site: make its key pair, or register its public key."""
    with clear_exit():
        if public is None:
            path = keys.add(directory, name, role or "")
            echo(f"{path}: hand it to {name} in a safe way, together with ca.crt")
        else:
            echo(f"{keys.admit(directory, name, public, role or '')}: admitted")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site.")],
    directory: Dir = HERE,
) -> None:
    """Revoke a site's key; a running server refuses the site within seconds."""
    with clear_exit():
        path = keys.revoke(directory, name)
    echo(f"{name} is revoked; its old key lies at {path}")


@app.command("list")
def list_(directory: Dir = HERE) -> None:
    """Show the sites that have a key."""
    with clear_exit():
        if not directory.is_dir():
            raise KeyFileError(
                f"there is no folder {directory}: make one with `fedda keys init --dir "
                f"{directory}`, or name another by --dir"
            )
        for name in keys.names(directory):
            role = keys.role(directory / "nodes" / f"{name}.pub")
            has_private = (directory / "nodes" / name).exists()
            note = "  (the private key is still here)" if has_private else ""
            echo(f"{name}{f'  {role} only' if role else ''}{note}")
        revoked = len(keys.revoked_keys(directory))
    if revoked:
        echo(f"{revoked} revoked")
