"""How the two ends of a lane recognise each other.

A run's program makes a new certificate, and a site accepts only that one: host names and
certificate authorities play no part. A site sends its ticket with its call. The program keeps only
the hashes of tickets.
"""

import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as serial
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TICKET = "fedda-ticket"  # its name in the call's metadata
TICKETS = re.compile(r"[0-9a-f]{64}")
CERTIFICATES = re.compile(
    r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]{1,8192}-----END CERTIFICATE-----\s*"
)
DAYS = 365
PING_MS = 20_000  # after so long, and as long again, a site takes a silent server for gone


def fresh(host: str) -> tuple[bytes, bytes]:
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
    """The hash of a ticket: all that the run's program keeps of it."""
    return sha256(ticket.encode()).digest()
