"""What a site is told of a run's lane, and how both ends prove who they are.

A run's program makes a certificate of its own and the site accepts that one only. The site dials
the host that it dials anyway: at the same port, where fedda's server passes the connection on by
the lane's name, or at one of the run's own. There it shows its ticket and a signature of its node
key.
"""

import base64
import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedda.errors import WireError

from .tls import CERTIFICATES, TICKETS

KIND = "query.lane"  # of the message that invites
MOST = 16_384  # characters of an invitation
NAME = re.compile(r"lane-[0-9a-f]{32}")
PATH = "/fedda.lane.Lane/Serve"
SIGNATURE = "fedda-signature"  # its name in the call's metadata; that of the ticket is `tls.TICKET`


def new_name() -> str:
    """A name for a lane, which the first bytes of every connection to it say."""
    return f"lane-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class LaneInvitation:
    """What one site needs for its lane of one run.

    Attributes:
        name: of the run's lanes.
        certificate: the only one that the site accepts, in PEM.
        ticket: 64 hexadecimal digits that only this site and the run's program know.
        port: of the run's own, at the server's host; 0: the one that the site dials anyway.
    """

    name: str
    certificate: str = field(repr=False)
    ticket: str = field(repr=False)
    port: int = 0

    def text(self) -> str:
        """The invitation as it travels, in a message's `group_id`: that comes with its head."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "LaneInvitation":
        """Read what `text` wrote, trusting nothing.

        Raises:
            WireError: it is no invitation.
        """
        try:
            made = cls(**json.loads(text if len(text) <= MOST else ""))
            made.check()
        except (ValueError, TypeError, RecursionError):
            raise WireError(
                "The invitation to a run cannot be read: server and site need the same version "
                "of fedda."
            ) from None
        return made

    def check(self) -> None:
        """Raise a ValueError or TypeError where a field has no such value."""
        rules = {NAME: self.name, CERTIFICATES: self.certificate, TICKETS: self.ticket}
        if not all(rule.fullmatch(value) for rule, value in rules.items()):
            raise ValueError
        if type(self.port) is not int or not 0 <= self.port < 2**16:
            raise ValueError

    def claim(self, node_id: int) -> bytes:
        """What the site signs: that it is this node, on this lane."""
        return sha256(f"fedda lane\n{self.text()}\n{node_id}".encode()).digest()


def sign(key: ec.EllipticCurvePrivateKey, claim: bytes) -> str:
    """A signature as it travels."""
    return base64.b64encode(key.sign(claim, ec.ECDSA(hashes.SHA256()))).decode()


def is_signed(public: bytes, claim: bytes, signature: str) -> bool:
    """Whether a claim is signed by the owner of a node's key.

    Args:
        public: the node's public key as Flower keeps it, in PEM.
        claim: the claim.
        signature: as `sign` wrote it.
    """
    try:
        key = serialization.load_pem_public_key(public)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(base64.b64decode(signature), claim, ec.ECDSA(hashes.SHA256()))
    except (AssertionError, InvalidSignature, ValueError):
        return False
    return True
