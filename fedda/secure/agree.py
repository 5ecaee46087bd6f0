"""How sites agree on keys behind a server that they do not trust.

A site makes an X25519 key pair for each try of a round and signs its public key with its node key,
the one that it registered. The others know that node key from a file that they did not get through
the server (`fedda.ops.keys.peers`), so the server cannot put a key of its own between two sites.

For sealed models (`fedda.secure.seal`) the target makes such a key. For secure sums all sources do,
and each pair has a mask. Its seed comes from the pair's shared secret and from everything that the
sites must agree on: the group with its keys, the settings of the training, the model that was sent,
round, try and largest weight. If the server tells two sites different things, their masks do not
cancel, and it gets noise.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedda.errors import SecureError
from fedda.wire.packing import SIGNATURE

HALF = SIGNATURE // 2  # bytes of r, and of s: as many as the largest of NIST's curves needs
SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True)
class Occasion:
    """What a site's key is for: one try of one round of one training, in one role."""

    training: str
    round: int
    attempt: int
    role: str = "source"

    def text(self, name: str, public: bytes) -> bytes:
        """What the site of this name signs."""
        about = [self.training, self.round, self.attempt, self.role, name, public.hex()]
        return b"fedda secure key\0" + json.dumps(about).encode()


@dataclass
class Own:
    """This site's key pair for one occasion.

    Attributes:
        occasion: what it is for.
        public: the public key.
    """

    occasion: Occasion
    _private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    @property
    def secret(self) -> str:
        """All of it, the private key included, as `Own.read` takes it."""
        return json.dumps([self._private.private_bytes_raw().hex(), *vars(self.occasion).values()])

    @classmethod
    def read(cls, secret: str) -> "Own":
        """Read what `secret` gave."""
        private, *occasion = json.loads(secret)
        return cls(Occasion(*occasion), X25519PrivateKey.from_private_bytes(bytes.fromhex(private)))

    def sign(self, name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
        """Sign the public key with the site's node key -> r and s, 132 bytes."""
        return sign(self.occasion.text(name, self.public), key)

    def decrypt(self, sealed: bytes, info: bytes) -> bytes:
        """Open what was sealed to this key by HPKE.

        Raises:
            InvalidTag: it was sealed to another key or for something else, or was changed.
        """
        return SUITE.decrypt(sealed, self._private, info)

    def seeds(self, name: str, group: Mapping[str, bytes], agreed: bytes) -> dict[bytes, bool]:
        """The seed of each pair's mask, and whether this site adds that mask.

        Args:
            name: this site.
            group: the public key of every member by name, this site's among them.
            agreed: everything else on which the members must agree.

        Raises:
            SecureError: a member's key is none with which a secret can be shared.
        """
        every = sorted((n, key.hex()) for n, key in group.items())
        salt = hashlib.sha256(agreed + json.dumps(every).encode()).digest()
        seeds = {}
        for other, public in group.items():
            if other == name:
                continue
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise SecureError(
                    f"The key of {other} is no X25519 key; remove the site."
                ) from None
            info = b"fedda secure sum mask\0" + json.dumps(sorted((name, other))).encode()
            seeds[HKDF(hashes.SHA256(), 32, salt, info).derive(secret)] = name < other
        return seeds


def verify(
    occasion: Occasion,
    name: str,
    public: bytes,
    signature: bytes,
    peers: Mapping[str, ec.EllipticCurvePublicKey],
) -> None:
    """Check that a key for an occasion is the named site's.

    Raises:
        SecureError: the site is unknown, or did not sign this.
    """
    check(occasion.text(name, public), "key", name, signature, peers)


def sign(text: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Sign with a node key -> r and s, 132 bytes."""
    signed = key.sign(text, ec.ECDSA(hashes.SHA512()))
    return b"".join(n.to_bytes(HALF, "big") for n in decode_dss_signature(signed))


def check(
    text: bytes,
    what: str,
    name: str,
    signature: bytes,
    peers: Mapping[str, ec.EllipticCurvePublicKey],
) -> None:
    """Check that a site signed a text.

    Raises:
        SecureError: the site is unknown, or did not sign this.
    """
    if name not in peers:
        raise SecureError(
            f"A {what} came from {name[:80]!r}, whose key is not in this site's peers for that "
            "role; get a file with it from its operator, or leave the site out."
        )
    r, s = (int.from_bytes(half, "big") for half in (signature[:HALF], signature[HALF:]))
    try:
        peers[name].verify(encode_dss_signature(r, s), text, ec.ECDSA(hashes.SHA512()))
    except InvalidSignature:
        raise SecureError(
            f"The {what} that came as that of {name!r} is not signed by it for this round and what "
            "the server sent here: the server sent it other settings or another model, the peers' "
            "file is out of date, or somebody stands between the sites."
        ) from None
