"""How the two ends of the gRPC exchange know each other, and the limits both keep.

The server makes a certificate per session and the site accepts no other, so names and authorities
play no part. The site shows a ticket with its call; of tickets the server keeps hashes only.
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
TICKET = "fedda-ticket"  # the call's metadata
DAYS = 365
# A peer that is gone without a word is noticed after the sum of the two.
PING_MS, PONG_MS = 10_000, 10_000


def fresh() -> tuple[bytes, bytes]:
    """A self-signed certificate and its private key, both PEM; the key is never written down."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # a site's clock may be behind
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption()
    )
    return certificate.public_bytes(serial.Encoding.PEM), private


def hashed(ticket: str) -> bytes:
    """What the server keeps of a ticket."""
    return sha256(ticket.encode()).digest()


def owner(ticket: str, known: Mapping[str, bytes]) -> str | None:
    """Whose ticket it is; the time it takes says nothing about how much of it was right."""
    found, given = None, hashed(ticket)
    for site, kept in known.items():
        if hmac.compare_digest(kept, given):
            found = site
    return found


def options(groups: Iterable[Group]) -> list[tuple[str, int | str]]:
    """Settings of gRPC for both ends: frames up to what was agreed on, and pings."""
    largest = max(group.size for group in groups) * FLOAT.itemsize + ROOM
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PONG_MS),
        ("grpc.http2.ping_timeout_ms", PONG_MS),  # without this, a minute
        ("grpc.http2.max_pings_without_data", 0),
    ]


def address(host: str, port: int) -> str:
    """Host and port as gRPC wants them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
