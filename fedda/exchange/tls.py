"""How the two ends of the gRPC exchange recognise each other, and the limits that both keep.

The server makes a new certificate for each session, and a site accepts only that one: host names
and certificate authorities play no part. A site sends its ticket with its call. The server keeps
only the hashes of tickets.
"""

import hmac
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedda.exchange.frames import FLOAT, ROOM
from fedda.exchange.groups import Group

NAME = "fedda-exchange"
PATH = "/fedda.exchange.Exchange/Join"
TICKET = "fedda-ticket"  # its name in the call's metadata
DAYS = 365
# Once the other end vanishes without closing, this end notices after the sum of the two.
PING_MS, PONG_MS = 10_000, 10_000


def fresh(host: str = NAME) -> tuple[bytes, bytes]:
    """A new self-signed certificate and its private key, in PEM; the key is never put on disk."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # a site's clock may be behind
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption()
    )
    return certificate.public_bytes(serial.Encoding.PEM), private


def hashed(ticket: str) -> bytes:
    """The hash of a ticket: all that the server keeps of it."""
    return sha256(ticket.encode()).digest()


def owner(ticket: str, known: Mapping[str, bytes]) -> str | None:
    """The site that a ticket belongs to, or None.

    How long this takes does not reveal how much of a wrong ticket was right.

    Args:
        ticket: as the caller sent it.
        known: the hash of every site's ticket.
    """
    site, digest = None, hashed(ticket)
    for name, expected in known.items():
        if hmac.compare_digest(expected, digest):
            site = name
    return site


def options(groups: Iterable[Group]) -> list[tuple[str, int | str]]:
    """Settings of gRPC at both ends: frames large enough for the groups' gradients, and pings."""
    largest = max(group.size for group in groups) * FLOAT.itemsize + ROOM
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PONG_MS),
        ("grpc.http2.ping_timeout_ms", PONG_MS),  # the default is a minute
        ("grpc.http2.max_pings_without_data", 0),
    ]
