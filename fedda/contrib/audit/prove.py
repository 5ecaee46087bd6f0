"""Evidence of what a site would reveal, as `fedda audit all` writes it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda import __version__
from fedda.config import IMAGES_HIDE
from fedda.contrib.audit.finding import Audit
from fedda.errors import ConfigError
from fedda.files import writing
from fedda.halves import load
from fedda.results import read
from fedda.results.escaping import echo

ABOVE = 4  # exit code: a figure is above a threshold of the policy

EvidenceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PAGE.html",
        dir_okay=False,
        help="Write what was found as a page, with the figures in PAGE.json.",
    ),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help=f"The site's policy: a figure above its [audit] ends this with exit code {ABOVE}.",
    ),
]


class Proof:
    """What is made of the attacks' figures. Bad files are refused here, before any attack.

    Raises:
        ConfigError: a page has a wrong name, or the policy cannot be read.
        RunError: the run has no results.
    """

    def __init__(self, run: Path, page: Path | None, policy: Path | None) -> None:
        rules = load("clients", "policy.rules").Policy
        self._policy = rules() if policy is None else rules.read(policy)
        self._least = IMAGES_HIDE if policy is None else self._policy.protect.min_images
        self._page = page
        if page is not None:
            if page.suffix != ".html":
                raise ConfigError(f"--evidence is {page}; give a page's name that ends in .html")
            self._results = read.load(run)

    def finish(
        self,
        model: Path,
        config: Mapping[str, Any],
        data: str,
        found: Sequence[Audit],
        options: Mapping[str, Any],
    ) -> None:
        """Write the page, and end with exit code 4 if a figure is above its threshold."""
        from fedda.contrib.report.page import evidence

        rows = [row for audit in found for row in audit.findings]
        figures = evidence.figures(rows, self._least)
        limits = self._policy.audit.model_dump(by_alias=True)
        odd = evidence.above(figures, limits)
        if self._page is not None:
            methods = read.summary(self._results)["methods"]
            crosses = {method: dict(about["bytes"]) for method, about in methods.items()}
            kinds = [kind for sizes in crosses.values() for kind in sizes]
            about = {
                "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                "fedda": __version__,
                "run": self._results["name"],
                "data": data,
                "model": f"SHA-256 {hashlib.sha256(model.read_bytes()).hexdigest()}",
                "crosses": crosses,
                "attacks": {audit.attack: audit.to_json() for audit in found},
                "figures": figures,
                "thresholds": limits,
                "above": odd,
                "risks": evidence.open_risks(config, kinds, rows, options),
                "options": dict(options),
                "config": dict(config),
            }
            self._write(self._page, evidence.page(about), json.dumps(about, indent=1))
        for name in odd:
            value, limit = figures[name], limits[name]
            shown = "was not measured" if value is None else f"is {value:.4f}"
            echo(f"above the policy: audit.{name} {shown}, and {limit:g} is allowed", err=True)
        if odd:
            raise typer.Exit(ABOVE)

    def _write(self, page: Path, html: str, table: str) -> None:
        more = page.with_suffix(".json")
        for path, text in ((page, html), (more, table)):
            with writing(path, "give another file by --evidence") as part:
                part.write_text(text, encoding="utf-8")
        echo(f"evidence: {page} and {more}", err=True)
