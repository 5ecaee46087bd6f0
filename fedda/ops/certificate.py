"""The server's certificate: made, renewed, and checked for its dates and private key.

    ca.crt, ca.key           the authority that signs; ca.crt goes to every site
    server.pem, server.key   the server's own certificate, for its host names

Private files are readable by their owner only. Nothing here touches the network.
"""

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedda.errors import KeyFileError, reason, typed
from fedda.files import keeping, unmarked

CA_DAYS = 3650
SERVER_DAYS = 825
SOON = timedelta(days=30)
LOOPBACK = "127.0.0.1"
ALWAYS = ("localhost", LOOPBACK)
AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedda authority")])


def init(directory: Path, hosts: Iterable[str] = ()) -> None:
    """Make an authority and a server certificate, valid for the hosts, localhost and 127.0.0.1.

    Raises:
        KeyFileError: the folder already holds an authority.
    """
    directory = Path(directory)
    for file in ("ca.key", "ca.crt"):
        if (directory / file).exists():
            raise KeyFileError(
                f"{directory / file} exists already, and a new authority would lock out every site "
                "that trusts it: give another folder, or move this one away first"
            )
    _sans(hosts := list(hosts))
    ca_key = ec.generate_private_key(ec.SECP384R1())
    ca = (
        _certificate(AUTHORITY, AUTHORITY, ca_key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA384())
    )
    _sign(directory, hosts, ca, ca_key)
    # Last: a folder with an authority has a server's certificate, too, whenever this was killed.
    pem = ca.public_bytes(serial.Encoding.PEM)
    write_pair(directory / "ca.key", _pem(ca_key), directory / "ca.crt", pem)


def renew(directory: Path, hosts: Iterable[str] = ()) -> None:
    """Make a new server certificate and key, signed by the authority in the folder.

    Raises:
        KeyFileError: the folder holds no authority, or one that cannot be used.
    """
    directory = Path(directory)
    authority, private = directory / "ca.crt", directory / "ca.key"
    if authority.exists() and not private.exists():
        raise KeyFileError(
            f"there is no {private}, which signs the server's certificate: put it back until this "
            f"is done; or renew where it is kept, in a folder with it and {authority}, and bring "
            f"server.pem and server.key from there to {directory}"
        )
    ca_key = _private(private)
    ca = _of_key(authority, private, _read(authority))
    _dates(authority, ca)
    _sign(directory, hosts, ca, ca_key)


def _sign(
    directory: Path,
    hosts: Iterable[str],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> None:
    """Make a server's certificate and key, signed by an authority."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedda server")])
    server = (
        _certificate(subject, ca.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_sans(hosts), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        # Which of two authorities of one name it is; Python 3.13 refuses a certificate without.
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .sign(ca_key, hashes.SHA384())
    )
    pem = server.public_bytes(serial.Encoding.PEM)
    write_pair(directory / "server.key", _pem(key), directory / "server.pem", pem)


def check_certificate(path: Path, key: Path | None = None) -> str:
    """Refuse a certificate that is missing, not valid now, or not of the given private key.

    Returns:
        A warning, if it expires soon.

    Raises:
        KeyFileError: with the dates and what to do.
    """
    certificates = _read(path)
    if key is not None:
        _of_key(path, key, certificates[:1])
    if certificates[0].issuer != certificates[0].subject:  # a chain, all of which is needed
        return next(filter(None, [_dates(path, each) for each in certificates]), "")
    # Of several authorities, as while one replaces another, any will do.
    now = datetime.now(UTC)
    valid = [c for c in certificates if c.not_valid_before_utc <= now <= c.not_valid_after_utc]
    return _dates(path, max(valid or certificates[:1], key=lambda c: c.not_valid_after_utc))


def _of_key(path: Path, key: Path, certificates: list[x509.Certificate]) -> x509.Certificate:
    """That of a file's certificates which belongs to a private key."""
    public = _private(key).public_key()
    for certificate in certificates:
        if certificate.public_key() == public:
            return certificate
    raise KeyFileError(
        f"{key} is not the private key of {path}: use the two files of the same "
        "`fedda keys init`, or make a new pair with `fedda keys renew`"
    )


def _dates(path: Path, certificate: x509.Certificate) -> str:
    """Refuse a certificate of a file that is not valid now; a warning, if it expires soon."""
    now = datetime.now(UTC)
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    todo = f"renew it {_renewal(path, certificate)} and start this server again"
    if certificate.issuer == certificate.subject:  # an authority, which nobody renews
        todo = "the server's operator makes another with `fedda keys init` and hands it out"
    if now > ends:
        raise KeyFileError(
            f"{path} expired on {ends:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M} UTC now: "
            f"{todo}; check this machine's clock, too"
        )
    if now < starts:
        raise KeyFileError(
            f"{path} is valid from {starts:%Y-%m-%d %H:%M} UTC and it is {now:%Y-%m-%d %H:%M} UTC "
            "now: set this machine's clock, or wait"
        )
    if ends - now >= SOON:
        return ""
    return f"{path} expires on {ends:%Y-%m-%d %H:%M} UTC, and no site can join from then on: {todo}"


def check_server(path: Path, authority: Path) -> str:
    """Refuse a server's certificate without 127.0.0.1, or of an authority that is not valid now.

    Returns:
        A warning, if that authority expires soon.

    Raises:
        KeyFileError: the server itself, which admits keys at 127.0.0.1, would not accept it.
    """
    chain = _read(path)
    certificate = chain[0]
    by = next((each for each in _read(authority) if _issued(chain[-1], each)), None)
    if by is None:
        raise KeyFileError(
            f"{path} is not signed by {authority}, which sites have: put back the one that belongs "
            f"to it, or make {path.name} anew {_renewal(path, certificate)}"
        )
    if LOOPBACK not in (hosts := _hosts(certificate)):
        raise KeyFileError(
            f"{path} names {', '.join(hosts) or 'no host'} and not {LOOPBACK}, where this server "
            "admits sites' keys and takes runs: make one that names it, too, "
            f"{_renewal(path, certificate)}"
        )
    return _dates(authority, by)


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    with suppress(ValueError, TypeError, InvalidSignature):
        certificate.verify_directly_issued_by(by)
        return True
    return certificate == by


def _read(path: Path) -> list[x509.Certificate]:
    """All certificates of a file: an authority or several, or a server's and those that signed."""
    try:
        return x509.load_pem_x509_certificates(pem(path))
    except ValueError as error:
        raise KeyFileError(
            f"{path} is not a PEM certificate: give what `fedda keys init` made at the server"
        ) from error


def _hosts(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses of a server's certificate."""
    hosts: list[str] = []
    with suppress(x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts += [name for name in names.get_values_for_type(x509.DNSName) if name != LOOPBACK]
        hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return hosts


def _renewal(path: Path, certificate: x509.Certificate) -> str:
    """How a server's certificate is made anew."""
    here = (path.parent / "ca.key").is_file()
    if not here and certificate.issuer != AUTHORITY:
        return "where it is from"
    own = [host for host in _hosts(certificate) if host not in ALWAYS and "*" not in host]
    options = (word for host in own for word in ("--host", host))
    command = typed("fedda", "keys", "renew", "--dir", path.parent, *options)
    return f"with `{command}`{'' if here else ', for which ca.key has to be put back there,'}"


def pem(path: Path) -> bytes:
    """A certificate as PEM, also of a file in the binary form (DER) that Windows writes.

    Raises:
        KeyFileError: the file cannot be read.
    """
    content = read(path, "certificate")
    return ssl.DER_cert_to_PEM_cert(content).encode() if content[:1] == b"0" else content


def read(path: Path, what: str) -> bytes:
    try:
        return unmarked(Path(path).read_bytes())
    except OSError as error:
        raise KeyFileError(
            f"the {what} {path} cannot be read ({reason(error)}): give the path of an existing "
            "file, or make it with `fedda keys`"
        ) from error


def write_pair(private: Path, secret: bytes, public: Path, content: bytes) -> None:
    """Write a private file, which others cannot read at any time, and its public half, or none."""
    with keeping(public) as shown, keeping(private, private=True) as hidden:
        hidden.write_bytes(secret)
        shown.write_bytes(content)


def opened(path: Path) -> str:
    """A warning about a private file that other accounts can read or write; empty if none can."""
    if os.name != "posix":
        return ""
    about = path.stat()
    # Another account's file, as a secret of a cluster, may be there for this one's group.
    if not about.st_mode & (0o066 if about.st_uid == os.geteuid() else 0o006):
        return ""
    return f"{path} is open to other accounts, and it is private: `{typed('chmod', '600', path)}`"


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A site's clock may be a little behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _sans(hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_san(host) for host in dict.fromkeys([*hosts, *ALWAYS])])


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9.*_-]+", host):
        raise KeyFileError(
            f"{host!r} is neither a host name nor an IP address: give names like hub.example.org "
            "without scheme and port"
        )
    return x509.DNSName(host)


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serial.load_pem_private_key(read(path, "private key"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyFileError(
            f"{path} is not a PEM private key without passphrase: make one with `fedda keys init`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileError(f"{path} is not an elliptic-curve key: make one with `fedda keys init`")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
