"""Sites' keys, by which a server knows whom to admit.

A server's folder holds, besides its certificate (`fedda.ops.certificate`),

    nodes/NAME.pub         the public key of each site, in OpenSSH format
    nodes/NAME             its private key, if it was made here; it goes to that site only
    nodes/revoked/         key pairs that were revoked
    peers                  all public keys of nodes/ in one file, for sites that add up in secret

A site takes part under NAME only, and in one role only if its public key's line ends in
role=source or role=target.

A site makes its key pair itself, and its .pub is its request to be admitted. Somebody on the way
could put a key of their own in its place, so the operator compares the fingerprint with the one
that the site reads out. Its first signature shows that it has the private key.

A server reads the folder: it admits the sites whose public key lies in nodes/ and refuses those in
nodes/revoked/, also when the folder changes while it runs. Nothing here touches the network.
"""

import base64
import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec

from fedda.errors import KeyFileError, typed
from fedda.files import put
from fedda.ops.certificate import read, write_pair

# Each request of a site is signed: on P-384 that takes three times as long, at both ends.
CURVE = ec.SECP256R1()
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ONLY = {f"role={role}": role for role in ("source", "target")}
ROLE = re.compile(rb" role=(source|target)\s*$")


def add(directory: Path, name: str, role: str = "") -> Path:
    """Make the key pair of one site and return the private key's path.

    Args:
        directory: the server's folder.
        name: the site, and its key's file.
        role: source or target, if the site may play only one of them.

    Raises:
        KeyFileError: the name cannot be a file name, or has a key already.
    """
    _check_free(directory, name)
    path = Path(directory) / "nodes" / name
    _make(path, name, role)
    _write_peers(directory)
    return path


def request(folder: Path, name: str, role: str = "") -> tuple[Path, str]:
    """Make a site's key pair in a folder at the site -> its .pub, and the key's fingerprint.

    Raises:
        KeyFileError: the name cannot be a file name, or the folder holds a file of that name.
    """
    check_name(name)
    private, public = Path(folder) / name, Path(folder) / f"{name}.pub"
    for file in (private, public):
        if file.exists():
            raise KeyFileError(
                f"{file} exists already: send {name}.pub that was made with it, or choose another "
                "folder or name"
            )
    return public, fingerprint(_make(private, name, role))


def _make(private: Path, name: str, role: str) -> ec.EllipticCurvePublicKey:
    """Make a key pair, the private key's file and, beside it, its .pub -> the public key."""
    key = ec.generate_private_key(CURVE)
    public = _line(key.public_key(), name, role)
    write_pair(private, private_bytes(key), private.with_name(f"{name}.pub"), public)
    return key.public_key()


def read_request(path: Path) -> tuple[str, str, ec.EllipticCurvePublicKey]:
    """Read a site's .pub, which was sent -> its name, the only role that it will play, its key.

    Raises:
        KeyFileError: it is no public key of a site.
    """
    line = read(path, "public key")
    key, words = _public(line, path), line.decode(errors="replace").split()[2:]
    site, only = (*words, "", "")[:2]
    check_name(site)
    if len(words) > 2 or only not in ("", *ONLY):
        raise KeyFileError(
            f"{path} says more than a site's name and its role: let the site make one with `fedda "
            "keys request` and send it again"
        )
    return site, ONLY.get(only, ""), key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """A key's fingerprint, as `ssh-keygen -l` shows it."""
    line = key.public_bytes(serial.Encoding.OpenSSH, serial.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def admit(directory: Path, name: str, public: Path, role: str = "") -> Path:
    """Store the public key of a site that made its key pair itself and keeps the private key.

    The comment in the site's own file is not kept; the arguments are those of `add`.

    Raises:
        KeyFileError: the name is not valid or is taken, or the file is not a public key, or the key
            is another site's or was revoked.
    """
    return admit_key(directory, name, _public(read(public, "public key"), public), role)


def admit_key(
    directory: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    role: str = "",
) -> Path:
    """Store a site's public key; like `admit`."""
    _check_free(directory, name)
    for other, known in public_keys(directory).items():
        if known == key:
            raise KeyFileError(
                f"this key is registered under the name {other}, and a key is for one name only: "
                f"let {name} make a key of its own, or revoke {other} and let that site do so"
            )
    if key in revoked_keys(directory):
        raise KeyFileError(
            f"this key was revoked and is refused for ever: let {name} make a new one with "
            "`fedda keys request`"
        )
    target = Path(directory) / "nodes" / f"{name}.pub"
    target.parent.mkdir(parents=True, exist_ok=True)
    put(target, _line(key, name, role))
    _write_peers(directory)
    return target


def revoke(directory: Path, name: str) -> Path:
    """Move a site's keys to nodes/revoked; a running server refuses the site within seconds.

    Raises:
        KeyFileError: the site has no key in the folder.
    """
    public = _admitted(directory, name)
    revoked = public.parent / "revoked"
    revoked.mkdir(exist_ok=True)
    stamp = f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    private = public.with_suffix("")
    if private.exists():
        private.rename(revoked / stamp)
    moved = public.rename(revoked / f"{stamp}.pub")
    _write_peers(directory)
    return moved


def names(directory: Path) -> list[str]:
    """The sites whose keys a folder holds."""
    return sorted(file.stem for file in (Path(directory) / "nodes").glob("*.pub"))


def public_keys(directory: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public key of every site in a folder, by the site's name.

    Raises:
        KeyFileError: a file is not a public key.
    """
    folder = Path(directory) / "nodes"
    return {file.stem: public_key(file) for file in folder.glob("*.pub")}


def revoked_keys(directory: Path) -> list[ec.EllipticCurvePublicKey]:
    """The public keys in a folder's nodes/revoked."""
    folder = Path(directory) / "nodes" / "revoked"
    return [public_key(file) for file in folder.glob("*.pub")]


def peers(path: Path, role: str = "source") -> dict[str, ec.EllipticCurvePublicKey]:
    """Read the public keys of a federation's sites from one file, by the sites' names.

    Each line is that of a site's .pub file, whose comment begins with the site's name.

    Args:
        path: the file.
        role: source or target; sites that may only have the other role are left out.

    Raises:
        KeyFileError: the file is missing, a line is not a public key with a name, or two have one.
    """
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    for line in read(path, "peers' keys").splitlines():
        _, _, name = line.decode(errors="replace").partition(" ")[2].partition(" ")
        site = name.split(" ")[0]
        if not NAME.fullmatch(site) or site in found:
            raise KeyFileError(
                f"{path} has a line with no name, or with one that another line has; give the file "
                "`peers` that `fedda keys add` writes"
            )
        key, only = _public(line, path), ROLE.search(line)
        if only is None or only[1] == role.encode():
            found[site] = key
    return found


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a site's public key.

    Raises:
        KeyFileError: the file is missing, unreadable or not a public key.
    """
    return _public(read(path, "public key"), path)


def role(path: Path) -> str:
    """The only role that a public key was registered for: source, target, or empty for both."""
    found = ROLE.search(read(path, "public key"))
    return found[1].decode() if found else ""


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    Raises:
        KeyFileError: the file is missing, unreadable or not a private key.
    """
    try:
        key = serial.load_ssh_private_key(read(path, "site key"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"{path} is not an OpenSSH private key without passphrase: "
            "give the file that `fedda keys request` made (the one without .pub)"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileError(
            f"{path} holds a key that is not elliptic-curve: make one with `fedda keys request`"
        )
    return key


def _write_peers(directory: Path) -> None:
    folder = Path(directory) / "nodes"
    lines = [(folder / f"{n}.pub").read_bytes() for n in names(directory)]
    put(Path(directory) / "peers", b"".join(lines))


def _line(key: ec.EllipticCurvePublicKey, name: str, role: str) -> bytes:
    line = key.public_bytes(serial.Encoding.OpenSSH, serial.PublicFormat.OpenSSH)
    return line + f" {name}{f' role={role}' * bool(role)}\n".encode()


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as Flower keeps it."""
    return key.public_bytes(serial.Encoding.PEM, serial.PublicFormat.SubjectPublicKeyInfo)


def private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key in OpenSSH format, without passphrase."""
    form = serial.PrivateFormat.OpenSSH
    return key.private_bytes(serial.Encoding.PEM, form, serial.NoEncryption())


def check_name(name: str) -> None:
    """Refuse a name that a site's key cannot have.

    Raises:
        KeyFileError: it cannot be a file's name.
    """
    if not NAME.fullmatch(name) or name == "revoked" or name.endswith(".pub"):
        raise KeyFileError(
            f"{name!r} cannot name a site's key: use up to 63 letters, digits, dots, dashes or "
            "underscores, beginning with a letter or digit"
        )


def _admitted(directory: Path, name: str) -> Path:
    """The public key of a site that is admitted."""
    public = Path(directory) / "nodes" / f"{name}.pub"
    if name not in names(directory):
        known = ", ".join(names(directory)) or "none"
        raise KeyFileError(
            f"no site {name!r} has a key in {directory} (known: {known}): nothing was changed"
        )
    return public


def _check_free(directory: Path, name: str) -> None:
    check_name(name)
    for file in (name, f"{name}.pub"):
        if (Path(directory) / "nodes" / file).exists():
            raise KeyFileError(
                f"{Path(directory) / 'nodes' / file} exists already: revoke that key first "
                f"(`{typed('fedda', 'keys', 'revoke', name, '--dir', directory)}`), or choose "
                "another name"
            )


def _public(line: bytes, path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serial.load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"{path} is not an OpenSSH public key: give the .pub file of the site's key pair"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise KeyFileError(
            f"{path} is not an elliptic-curve key: the site makes one with `fedda keys request`"
        )
    return key
