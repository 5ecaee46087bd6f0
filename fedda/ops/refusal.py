"""Why a server refuses a site: a code in a header of its answer, and a sentence for either side.

    clock      the site's clock differs too much, so that its signatures seem old or from the future
    unknown    the key is not registered
    revoked    the key was registered once
    replay     the same signature came before
    signature  the request is not signed as it must be
    in-use     the key has a session, of another process or of one that was killed
    role       the key is registered for the other role
    name       the key is registered under another name
    version    the server runs another version of fedda
    program    the site runs another program than fedda's client
    port       it dials the operator's port

Only the code crosses, and of two of them a word more. Each side makes the sentence itself, so that
nobody can write into the other's log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

REFUSED = "x-fedda-refused"  # in an answer: the code, and what it is about
OFFERS = "x-fedda-site"  # in the request that begins a session: the site's role, name and version
ABOUT = re.compile(r"[0-9A-Za-z.+-]{0,64}")

AT_SITE = {
    "clock": "this machine's clock is {about} the server's: set it right, as a time service does",
    "unknown": "its key is not registered there: ask the server's operator to admit it "
    "(`fedda keys list` shows who is)",
    "revoked": "it was revoked there, or is not registered now: ask the server's operator whether "
    "this site may take part again",
    "replay": "a request came there twice: something on the way repeats requests",
    "signature": "its signature is missing or wrong: check that nothing on the way changes headers",
    "in-use": "another process uses its key, or the previous session still counts as online: give "
    "every site its own key",
    "role": "its key is registered for the other role: give --role {about}, or ask the server's "
    "operator for a key of this role",
    "name": "its key is registered under another name: leave --name out, or give the one that the "
    "server's operator chose",
    "version": "the server runs fedda {about}: install the same version here",
    "program": "it takes fedda's own client alone: start `fedda-client` without --stock",
    "port": "it is the operator's port: give --superlink the one that sites dial, which `fedda "
    "superlink` names as it starts",
}
AT_SERVER = {
    "clock": "its clock is {about} this machine's: its operator has to set it",
    "unknown": "its key is not registered: `fedda keys sign` admits it",
    "revoked": "its key was revoked",
    "replay": "a request came twice: something on the way repeats requests",
    "signature": "its signature is missing or wrong",
    "in-use": "its key is in use: by another process, or by one that was killed a moment ago",
    "role": "its key is registered as a {about}, and it offers itself in the other role",
    "name": "its key is registered under another name than it gives",
    "version": "it runs another version of fedda than this server's {about}",
    "program": "it is no client of fedda's: Flower's own SuperNodes need Flower's own SuperLink",
    "port": "it dials the operator's port",
}
LASTING = {"role", "name", "version", "program", "port"}  # to try again does not help


@dataclass(frozen=True)
class Refusal:
    """One of the codes, and the word that its sentence needs more: seconds, a role or a version."""

    code: str
    about: str = ""

    @classmethod
    def read(cls, header: str | None) -> "Refusal | None":
        """Read the header of an answer; None if it has none that makes sense."""
        code, _, about = (header or "").partition(" ")
        known = code in AT_SITE and ABOUT.fullmatch(about) is not None
        return cls(code, about) if known else None

    @property
    def header(self) -> str:
        return f"{self.code} {self.about}".strip()

    @property
    def lasts(self) -> bool:
        return self.code in LASTING

    def at_site(self) -> str:
        """What a site's log says, after "the server refuses this site: "."""
        return AT_SITE[self.code].format(about=self._word())

    def at_server(self) -> str:
        """What a server's console says, after the site's name."""
        return AT_SERVER[self.code].format(about=self._word())

    def _word(self) -> str:
        if self.code != "clock":
            return self.about
        try:
            seconds = float(self.about)
        except ValueError:
            return "far from"
        return f"{abs(seconds):.0f} s {'behind' if seconds > 0 else 'ahead of'}"


def offers(role: str, name: str, version: str) -> str:
    """Write what a site says of itself when it begins a session, as a header."""
    return f"role={quote(role)}; name={quote(name, safe='')}; fedda={quote(version)}"


def offered(header: str) -> Mapping[str, str]:
    """Read what `offers` wrote; what is no pair of a name and a value is left out."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {key: unquote(value) for key, equals, value in pairs if equals}
