"""`fedda keys`: make the server's certificate; request, make, admit and revoke sites' keys."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedda.cli.as_json import JsonOption, print_json
from fedda.errors import KeyFileError, typed
from fedda.ops import certificate, keys
from fedda.ops.address import host as read_host
from fedda.results.escaping import echo

app = typer.Typer(
    no_args_is_help=True,
    help="""Make the server's certificate and every site's key.

    These commands change a folder and need no network. `fedda superlink --dir DIR` admits the sites
    whose public key lies in DIR/nodes; while it runs, it follows changes within two seconds.

      fedda keys init --dir hub --host hub.example.org

      fedda keys request clinic-a --out .     (at clinic A, which sends clinic-a.pub to the server)

      fedda keys sign clinic-a.pub --dir hub  (at the server; it sends hub/ca.crt to clinic A)

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
Name = Annotated[str, typer.Argument(metavar="NAME", help="The site.")]
Role = Annotated[
    Literal["source", "target"] | None,
    typer.Option(help="The only role that the site may play. Default: either."),
]
HERE = Path("fedda-server")


@app.command()
def init(directory: Dir = HERE, host: Hosts = None) -> None:
    """Make a new authority and the server's certificate."""
    certificate.init(directory, [read_host(each) for each in host or ()])
    echo(f"{directory / 'ca.crt'}: give it to every site")
    echo(f"{directory / 'server.pem'}: the server's certificate, {certificate.SERVER_DAYS} days")


@app.command()
def renew(directory: Dir = HERE, host: Hosts = None) -> None:
    """Make a new server certificate with the same authority; sites need no new files."""
    certificate.renew(directory, [read_host(each) for each in host or ()])
    echo(f"{directory / 'server.pem'}: renewed; restart the server to use it")


@app.command()
def request(
    name: Name,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the two files go.")],
    role: Role = None,
) -> None:
    """At a site: make its key pair here, of which the public half can be sent openly.

    The private key stays: FOLDER/NAME, which only you may read. FOLDER/NAME.pub goes to the
    server's operator. Read the fingerprint out when the operator calls: it shows that nobody put
    another key in its place.
    """
    path, fingerprint = keys.request(out, name, role or "")
    echo(f"{out / name}: the private key; it never leaves this site")
    echo(f"{path}: send it to the server's operator")
    echo(f"{fingerprint}: read it to the operator by telephone")


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="PUBLIC_KEY", readable=False)],
    directory: Dir = HERE,
    fingerprint: Annotated[str | None, typer.Option(metavar="SHA256:...")] = None,
    yes: Annotated[bool, typer.Option("--yes")] = False,
    role: Role = None,
) -> None:
    """At the server: check the public key that a site has sent, and admit it.

    Without --fingerprint or --yes it asks whether the site reads out the same fingerprint.

    Options:
        file: The site's NAME.pub.
        fingerprint: The fingerprint that the site read out; another key is refused.
        yes: The fingerprint was compared in another way.
    """
    name, asked, key = keys.read_request(file)
    if role and asked and role != asked:
        raise KeyFileError(
            f"{name} asks to be a {asked} only, and --role says {role}: leave --role out, or "
            "let the site make another key"
        )
    only, shown = role or asked, keys.fingerprint(key)
    echo(f"{name}{f', {only} only' if only else ''}: {shown}")
    if fingerprint is None and not yes:
        _ask(name)
    elif fingerprint and fingerprint.strip().removeprefix("SHA256:") != shown[7:]:
        raise KeyFileError(
            f"{file} has the key {shown}, not {fingerprint}: ask {name} for its fingerprint "
            "again; if it has another, the key was exchanged on its way"
        )
    path = keys.admit_key(directory, name, key, only)
    echo(f"{path}: admitted; send it ca.crt")


def _ask(name: str) -> None:
    if not _at_terminal():
        raise KeyFileError(
            f"nobody compared the fingerprint of {name}, and anybody can send a key in its place: "
            "let the site read it out and give it by --fingerprint, or give --yes"
        )
    if not typer.confirm(f"Does {name} read out the same fingerprint by telephone?"):
        raise KeyFileError(f"{name} was not admitted: ask it for a new key")


def _at_terminal() -> bool:
    return sys.stdin.isatty()


@app.command()
def add(
    name: Name,
    directory: Dir = HERE,
    public: Annotated[Path | None, typer.Option(metavar="FILE", readable=False)] = None,
    role: Role = None,
) -> None:
    """Register a site's public key, or make its key pair here and know its private key.

    With `fedda keys request` at the site, its private key never leaves it.

    Options:
        public: A public key that the site made itself, as by `ssh-keygen -t ecdsa -b 256`. Without
            this option the key pair is made here.
    """
    if public is None:
        path = keys.add(directory, name, role or "")
        echo(f"{path}: hand it to {name} in a safe way, together with ca.crt")
    else:
        path = keys.admit(directory, name, public, role or "")
        echo(f"{path}: admitted")


@app.command()
def revoke(name: Name, directory: Dir = HERE) -> None:
    """Revoke a site's key; a running server refuses the site within seconds."""
    path = keys.revoke(directory, name)
    echo(f"{name} is revoked; its old key lies at {path}")


@app.command("list")
def list_(directory: Dir = HERE, as_json: JsonOption = False) -> None:
    """Show the sites that have a key."""
    if not directory.is_dir():
        raise KeyFileError(
            f"there is no folder {directory}: make one with "
            f"`{typed('fedda', 'keys', 'init', '--dir', directory)}`, or name another by --dir"
        )
    sites = {
        name: {
            "role": keys.role(directory / "nodes" / f"{name}.pub"),
            "private_key_here": (directory / "nodes" / name).exists(),
        }
        for name in keys.names(directory)
    }
    revoked = len(keys.revoked_keys(directory))
    if as_json:
        return print_json({"sites": sites, "revoked": revoked})
    for name, about in sites.items():
        role = f"  {about['role']} only" if about["role"] else ""
        note = "  (the private key is still here)" if about["private_key_here"] else ""
        echo(f"{name}{role}{note}")
    if revoked:
        echo(f"{revoked} revoked")
