"""Files that a site signs with its node key, so that others can tell whose they are.

PAGE.sig lies beside PAGE. It holds the SHA-256 of PAGE and of the file that belongs to it, and an
ECDSA signature of these. The signed bytes begin with words of their own, so a signature that the
key gave elsewhere fits nothing here, and the other way round.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedda.errors import KeyFileError
from fedda.files import replacing
from fedda.ops.certificate import read

WORDS = b"fedda evidence 1\n"


def sign(page: Path, more: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    """Sign a page and the file that belongs to it -> the file of the signature."""
    signature = key.sign(_signed(page, more), ec.ECDSA(hashes.SHA384()))
    path = signature_of(page)
    about = {"files": _hashes(page, more), "signature": base64.b64encode(signature).decode()}
    with replacing(path) as part:
        part.write_text(json.dumps(about, indent=1))
    return path


def verify(page: Path, more: Path, peers: Mapping[str, ec.EllipticCurvePublicKey]) -> str:
    """Check a page's signature -> the site whose key made it.

    Raises:
        KeyFileError: a file is missing or was changed, or none of these sites has signed it.
    """
    path = signature_of(page)
    try:
        about = json.loads(read(path, "signature"))
        signature, files = base64.b64decode(about["signature"], validate=True), about["files"]
    except (ValueError, TypeError, LookupError) as error:
        raise KeyFileError(f"{path} is not a signature: ask the site for the file again") from error
    now = _hashes(page, more)
    if files != now:
        odd = [name for name in now if not isinstance(files, dict) or files.get(name) != now[name]]
        raise KeyFileError(
            f"{', '.join(odd) or path.name} was changed after it was signed: ask the site for the "
            "files again"
        )
    for name, key in peers.items():
        try:
            key.verify(signature, _signed(page, more), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            continue
        return name
    raise KeyFileError(
        f"none of {', '.join(peers) or 'no sites'} has signed {page}: give the `peers` of this "
        "federation, or ask the site for the files again"
    )


def signature_of(page: Path) -> Path:
    """Where a page's signature lies."""
    return page.with_name(f"{page.name}.sig")


def _hashes(*files: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(read(file, "file")).hexdigest() for file in files}


def _signed(page: Path, more: Path) -> bytes:
    return WORDS + json.dumps(list(_hashes(page, more).values())).encode()
