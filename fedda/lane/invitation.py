"""What a site is told of a run's lane, and how both ends prove who they are.

A run's program makes a certificate of its own and the site accepts that one only. The site dials
the address that it dials anyway; the server passes the connection on, by the lane's name. There
the site shows its ticket and a signature of its node key.
"""

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedda.errors import WireError

from .tls import CERTIFICATES, TICKETS

KIND = "query.lane"  # of the message that invites, and the name of its table
TABLE = "lane"
NAME = re.compile(r"lane-[0-9a-f]{32}")
PATH = "/fedda.lane.Lane/Serve"
SIGNATURE = "fedda-signature"  # its name in the call's metadata; that of the ticket is `tls.TICKET`
FIELDS = {"name", "certificate", "ticket"}


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
    """

    name: str
    certificate: str = field(repr=False)
    ticket: str = field(repr=False)

    def flat(self) -> dict[str, str]:
        """The invitation as the table of a message."""
        return dict(vars(self))

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> "LaneInvitation":
        """Read what `flat` wrote, trusting nothing.

        Raises:
            WireError: it is no invitation.
        """
        rules = {"name": NAME, "certificate": CERTIFICATES, "ticket": TICKETS}
        fields = dict(flat)
        if {*fields} != FIELDS or not all(
            isinstance(fields[name], str) and rule.fullmatch(fields[name])
            for name, rule in rules.items()
        ):
            raise WireError(
                "The invitation to a run cannot be read: server and site need the same version "
                "of fedda."
            )
        return cls(**fields)

    def claim(self, node_id: int) -> bytes:
        """What the site signs: that it is this node, on this lane."""
        whole = "\n".join(["fedda lane", self.name, self.certificate, self.ticket, str(node_id)])
        return sha256(whole.encode()).digest()


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
