"""Ask a public service for known holes in what the image installs; `make audit` and releases do.

    python deploy/holes.py [OPTION OF pip-audit ...]      # such as --vulnerability-service osv

Exit code 1: there are holes, of whatever severity. 2: the service did not answer for every package;
what pip-audit says then is no reason to think that there are none.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parent
LOCKS = ("requirements.lock", "torch.lock", "tools.lock")
# Flower decides their versions, and they serve the public port.
PUBLIC = ("fastapi", "starlette", "uvicorn", "flwr")


def main(options: Sequence[str]) -> int:
    """Ask about every lock -> the exit code."""
    pinned = re.findall(r"^(\S+)==(\S+)", (DEPLOY / LOCKS[0]).read_text(), re.MULTILINE)
    at_port = ", ".join(f"{name} {version}" for name, version in pinned if name in PUBLIC)
    print(f"At the public port: {at_port}.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        install = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--require-hashes", "-r", str(DEPLOY / "tools.lock")]
        subprocess.run([scratch / "bin" / "python", "-m", *install, *wanted], check=True)
        reports = [asked(scratch, name, options) for name in LOCKS]
    code, said = judged([each for report in reports for each in report])
    print(said)
    return code


def asked(scratch: Path, lock: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """What pip-audit reports of each package of a lock."""
    report = scratch / f"{lock}.json"
    command = [scratch / "bin" / "pip-audit", "--disable-pip", "--require-hashes", *options]
    command += ["--progress-spinner", "off", "--format", "json", "--output", report]
    done = subprocess.run(
        [*command, "-r", DEPLOY / lock], capture_output=True, text=True, check=False
    )
    if report.exists():
        return json.loads(report.read_text())["dependencies"]
    why = (done.stderr.strip().splitlines() or ["pip-audit says nothing"])[-1]
    return [{"name": lock, "skip_reason": why}]


def judged(packages: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Say in one sentence what the reports are worth -> the exit code and the sentence."""
    holes = list(_holes(packages))
    unknown = [each for each in packages if "skip_reason" in each]
    if holes:
        return 1, f"Known holes, {len(holes)} in all: {', '.join(holes)}."
    if unknown or not packages:
        why = f"; {unknown[0]['skip_reason']}" if unknown else ""
        return 2, (
            f"The service that knows holes did not answer for {len(unknown)} of {len(packages)} "
            "packages or files, so they may have some: ask again from a machine that reaches it, "
            f"or another service with --vulnerability-service osv{why}"
        )
    return 0, f"No known hole in {len(packages)} packages."


def _holes(packages: Sequence[dict[str, Any]]) -> Iterator[str]:
    for each in packages:
        for hole in each.get("vulns", ()):
            fixed = " or ".join(hole.get("fix_versions", ())) or "no version"
            yield f"{hole['id']} in {each['name']} {each['version']} (mended in {fixed})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
