"""A site's request to be admitted: a PKCS #10 certificate request, signed with the site's new key.

The site makes its key pair itself, so its private key never leaves it; the signature shows that
whoever wrote the request has that key. It does not show who that is: somebody on the way could put
a request of their own in its place. So the operator admits it only after the fingerprint of its key
was compared with the one that the site reads out.
"""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedda.errors import KeyFileError
from fedda.ops import keys
from fedda.ops.certificate import read, write_private

ROLES = ("", "source", "target")
TAKEN = ec.SECP256R1, ec.SECP384R1
UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion)
AGAIN = "let the site make one with `fedda keys request` and send it again"


@dataclass(frozen=True)
class KeyRequest:
    """What a site asks for.

    Attributes:
        name: the site.
        role: the only role that it may play: source or target; empty for both.
        key: its public key.
    """

    name: str
    role: str
    key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint, as `ssh-keygen -l` shows it."""
        line = self.key.public_bytes(serial.Encoding.OpenSSH, serial.PublicFormat.OpenSSH)
        digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def ask(folder: Path, name: str, role: str = "") -> tuple[Path, KeyRequest]:
    """Make a site's key pair in `folder` -> the file of the request, and what it asks for.

    The folder then holds NAME, which is the private key and for its owner alone, and NAME.csr.

    Args:
        folder: at the site; made if it is missing.
        name: the site.
        role: source or target, if the site will play only one of them.

    Raises:
        KeyFileError: the name cannot be a file name, or the folder holds a file of that name.
    """
    keys.check_name(name)
    private, path = Path(folder) / name, Path(folder) / f"{name}.csr"
    for file in (private, path):
        if file.exists():
            raise KeyFileError(
                f"{file} exists already: send the request that was made with it, or choose another "
                "folder or name"
            )
    key = ec.generate_private_key(keys.CURVE)
    signed = x509.CertificateSigningRequestBuilder(_subject(name, role)).sign(key, hashes.SHA384())
    private.parent.mkdir(parents=True, exist_ok=True)
    write_private(private, keys.private_bytes(key))
    path.write_bytes(signed.public_bytes(serial.Encoding.PEM))
    return path, KeyRequest(name, role, key.public_key())


def read_request(path: Path) -> KeyRequest:
    """Read a request and check that the key in it has signed it.

    Raises:
        KeyFileError: it is no request, was changed, or is of a key or form that is not taken.
    """
    try:
        request = x509.load_pem_x509_csr(read(path, "request"))
        key, signed = request.public_key(), request.is_signature_valid
        names = {a.oid: str(a.value) for a in request.subject}
        digest = request.signature_hash_algorithm
    except UNREADABLE as error:
        raise KeyFileError(f"{path} is not a request for a key, or is damaged: {AGAIN}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, TAKEN):
        raise KeyFileError(
            f"{path} has a key that is not elliptic-curve on P-256 or P-384: {AGAIN}"
        )
    if not signed or not isinstance(digest, hashes.SHA384):
        raise KeyFileError(
            f"{path} is not signed by the key in it, so it was changed or somebody else's: {AGAIN}"
        )
    name = names.get(NameOID.COMMON_NAME, "")
    role = names.get(NameOID.ORGANIZATIONAL_UNIT_NAME, "")
    keys.check_name(name)
    if role not in ROLES or request.subject != _subject(name, role):
        raise KeyFileError(f"{path} says more than a site's name and its role: {AGAIN}")
    return KeyRequest(name, role, key)


def check_fingerprint(request: KeyRequest, given: str) -> None:
    """Refuse a request whose key has not the fingerprint that the site read out.

    Raises:
        KeyFileError: it has another.
    """
    if given.strip().removeprefix("SHA256:") != request.fingerprint.removeprefix("SHA256:"):
        raise KeyFileError(
            f"the request of {request.name} has the key {request.fingerprint}, not {given}: "
            "ask the site for its fingerprint again; if it has another, the request was exchanged "
            "on its way"
        )


def _subject(name: str, role: str) -> x509.Name:
    given = {NameOID.COMMON_NAME: name, NameOID.ORGANIZATIONAL_UNIT_NAME: role}
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in given.items() if value])
