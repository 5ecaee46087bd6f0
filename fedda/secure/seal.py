"""Models that the server relays and cannot read: from a source to the target, by HPKE.

RFC 9180 in its base mode, DHKEM(X25519), HKDF-SHA256 and AES-256-GCM. The target makes a key pair
for each round and signs it with its node key (`fedda.secure.agree`). A source signs what it has
sealed with its own. So the server can neither read a model, nor send one in a source's name.

    sealed   32 bytes of X25519, the model's bytes under AES, and a tag of 16 bytes
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from fedda.errors import SecureError
from fedda.secure.agree import SUITE, Own
from fedda.wire.packing import KEY, SIGNATURE, Entry, Kind, Manifest

LONGER = 48  # bytes by which a sealed model is longer than a plain one


def layouts(options: Any, model: Manifest) -> Mapping[str, Manifest]:
    """Return the layouts of the target's signed key and of a sealed model."""
    sealed = (
        Entry("sealed", "uint8", (model.nbytes + LONGER,)),
        Entry("examples", "int64", (1,)),
        Entry("signature", "uint8", (SIGNATURE,)),
    )
    return {
        "key": Manifest(Kind.KEY, model.floats, KEY),
        "sealed": Manifest(Kind.SEALED, model.floats, sealed),
    }


@dataclass(frozen=True)
class Envelope:
    """From whom a model goes to whom, and what for."""

    training: str  # the training's name
    round: int  # counted from 1
    source: str  # who trained it
    target: str  # who opens it
    public: bytes  # the target's key of this round
    begun: str  # hash of the settings and of the model that the training began from

    @property
    def info(self) -> bytes:
        """What a sealed model is bound to: opening it with another address fails."""
        about = [self.training, self.round, self.source, self.target, self.public.hex(), self.begun]
        return b"fedda sealed model\0" + json.dumps(about).encode()

    def text(self, sealed: bytes, examples: int) -> bytes:
        """What the source signs."""
        about = json.dumps([examples, hashlib.sha256(sealed).hexdigest()])
        return self.info + b"\0" + about.encode()


def seal(model: bytes, address: Envelope) -> bytes:
    """Seal a model's bytes.

    Raises:
        SecureError: the target's key is none to which anything can be sealed.
    """
    try:
        public = X25519PublicKey.from_public_bytes(address.public)
        return SUITE.encrypt(model, public, address.info)
    except ValueError:
        raise SecureError(f"The key of {address.target} is no X25519 key.") from None


def unseal(sealed: bytes, address: Envelope, own: Own) -> bytes:
    """Open what a source has sealed to this site's key.

    Raises:
        SecureError: it was sealed to another key or for something else, or was changed.
    """
    try:
        return own.decrypt(sealed, address.info)
    except InvalidTag:
        raise SecureError(
            f"The sealed model of {address.source} is not for this site's key of round "
            f"{address.round}; the round has to be repeated."
        ) from None
