"""`fedda-client`: join a site to a federation and answer the server with the site's data."""

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from fedda.cli.helped import HelpedCommand
from fedda.cli.its_files import names_files, reading_of
from fedda.cli.options import given, of_section
from fedda.config import is_site_name
from fedda.config.site_config import SiteConfig, SiteOptions
from fedda.errors import ConfigError, DataError, KeyFileError, UsageError
from fedda.files import states
from fedda.halves import load
from fedda.ops import certificate, keys, system
from fedda.ops.address import address
from fedda.ops.flwr_home import OFFLINE
from fedda.ops.proxies import proxy_to
from fedda.ops.spawn import die_with_parent, quiet_port, scripts_first, watch_parent
from fedda.results.escaping import PlainFormatter, echo

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Description

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


FILE = {"metavar": "FILE", "exists": True, "dir_okay": False}
SHOWN: dict[str, dict[str, Any]] = {
    "data": {"metavar": "DIR"},
    "key": {"metavar": "FILE", "readable": False},  # whose exit code is that of keys
    "state_dir": {"metavar": "DIR", "file_okay": False},
    "poison": {"metavar": "PERCENT"},
    **dict.fromkeys(("peers", "weights", "start_from", "teacher"), FILE),
}


@app.command(cls=HelpedCommand)
@names_files
@given("options", of_section(SiteOptions, SHOWN), dict)
def client(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")],
    options: dict[str, Any],
    ca: Annotated[Path | None, typer.Option(metavar="FILE", readable=False)] = None,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
    policy: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    *,
    files: dict[str, Any],
    no_notes: Annotated[bool, typer.Option("--no-notes")] = False,
    stock: Annotated[bool, typer.Option("--stock")] = False,
    log: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None,
    patience: Annotated[float, typer.Option(hidden=True)] = 120.0,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Join a federation with this site's data, and answer until Ctrl-C.

    A hospital whose labelled scans lie in /data/scans/train/<diagnosis>/*.png got ca.crt and
    hospital-a.key from the project's operator. It first checks what would be used, then joins:

      fedda data check /data/scans

      fedda-client --role source --data /data/scans --superlink hub.example.org:8443
      --ca ca.crt --key hospital-a.key

    The hospital that wants a model for its unlabelled scans joins with --role target.

    The data stay in this process. It connects to --superlink and to nothing else, and runs only the
    program installed here. What leaves the site are models, atoms, gradients of the
    method's discriminators and the numbers that the method's contract lists (`fedda methods
    --wire`). If the server cannot be reached, the client waits and joins again. Exit code 3 means
    trouble with a key or certificate, 2 with an option, 1 any other trouble, 0 that it was asked to
    stop.

    Options:
        superlink: The server to join.
        ca: The file ca.crt that the server's operator handed out.
        insecure: No TLS, no key: for trying out on one machine.
        policy: What this site lets a server do; see `fedda policy --help`.
        no_notes: Write no notes of a training: features and confusion matrix. They are written
            under --state-dir for this site only, and are never sent.
        stock: Run Flower's own SuperNode instead. Slower, and it executes whatever program the
            server sends.
        log: Write the full log here as well.
    """
    if parent_pid is not None:
        die_with_parent() if stock else watch_parent(parent_pid)
    server = address(superlink)
    superlink = str(server)
    more = {"server": superlink, "notes": not no_notes, "audited": True}
    site = SiteConfig.parse({**options, **files, **more})
    _check_options(ca, site.key, insecure)
    through = proxy_to(server, tls=not insecure)
    name = site.name or _default_name(site.data, site.key)
    if not is_site_name(name):
        raise UsageError(
            f"{name!r} cannot be a site's name: give --name with 1 to 64 printable characters, "
            "no '/', and no '.' in front"
        )
    state = site.state_dir or (states() / name).absolute()
    site = site.model_copy(update={"name": name, "state_dir": state})
    if site.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(site.threads)
    os.environ.update(OFFLINE)
    _logging(log)
    logging.getLogger("fedda.client").info("starting: %s, a %s", name, site.role)
    # A missing device is refused here, not in the middle of a run.
    chosen = load("clients", "site.memory").pick_device(site.device)
    rules = load("clients", "policy.rules").Policy
    protected = 0
    if policy is not None:
        policed = rules.read(policy)
        protected = policed.protect.min_images
        site = site.model_copy(update={"policy": policed.model_dump_json(by_alias=True)})
        from fedda import plugins

        plugins.restrict(policed.allow.plugins)  # before any of their code is imported
        for each in plugins.barred():
            echo(f"note: {each}", err=True)
    if site.peers is not None:
        keys.peers(site.peers)  # refused here, not in the middle of a run
    from fedda.data import verify

    # All values are read once: a site whose data cannot be used must not hold up a run. Files
    # that have not changed since they were found good are not read again.
    with load("clients", "site.reading").shown("all files once") as progress:
        reading = reading_of(**files)
        checked = verify(site.data, site.role, progress, known=state / "verified", reading=reading)
        summary = _summary(checked)
    echo(summary)
    if site.teacher is not None:
        check = load("clients", "site.teacher").checked
        found = check(site.teacher, site.role, site.data, reading, chosen)
        echo(f"teacher {site.teacher}: {found}")
    try:  # it may join and be tested, and says in every round why it does not train
        checked.check_size(max(site.min_images, protected))
    except DataError as error:
        echo(f"warning: {error}")
    config = site.table()
    # Held until the process ends: two clients with one folder would use the same session.
    with _lock(state) as lock:
        trail = load("clients", "policy.audit_log").AuditLog(state)
        trail.started(name, site.policy)
        if stock:
            _exec_stock(config, superlink, ca, site.key, state, lock)
        import torch

        if site.threads is not None:
            torch.set_num_threads(site.threads)
        # A process's first optimizer imports for two seconds: now, and not in a run's round 1.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        resident, installed = load("clients", "node.resident"), load("clients", "app").app
        standing = load("clients", "node.standing").Standing(state)

        events = logging.getLogger("fedda.client.events")

        def say(kind: str, text: str) -> None:
            events.info("%s: %s", kind, text)
            standing.tell(kind, text)

        how = f"through the proxy {through}" if through else "directly, through no proxy"
        logging.getLogger("fedda.client").info("connecting to %s, %s", superlink, how)
        standing.tell("waiting", f"connecting to {superlink}, {how}")
        with standing.until_it_fails():
            resident.serve(
                installed,
                superlink=superlink,
                node_config=config,
                root_certificates=ca,
                key=site.key,
                insecure=insecure,
                on_event=say,
                on_refusal=trail.answered,
                state=state,
                patience=patience,
                proxy=through,
                most_bytes=partial(load("clients", "app").most_bytes, node=config),
            )


def _logging(file: Path | None) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(PlainFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _check_options(ca: Path | None, key: Path | None, insecure: bool) -> None:
    if insecure and (ca or key):
        raise UsageError(
            "--insecure contradicts --ca and --key: leave out --insecure to use TLS, or leave out "
            "--ca and --key"
        )
    if insecure:
        return
    warnings = [] if ca is None else [certificate.check_certificate(ca)]
    if key is None:
        raise KeyFileError(
            "no --key was given, but the server admits registered sites only: give this site's "
            "private key, or --insecure to try out on one machine"
        )
    keys.load_node_key(key)
    for warning in filter(None, (*warnings, certificate.opened(key))):
        echo(f"warning: {warning}", err=True)


def _default_name(data: Path, key: Path | None) -> str:
    if key is not None:  # a folder may be called after what nobody else should know
        return key.name.removesuffix(".key")
    return data.stem if data.is_file() else data.name


def _summary(description: "Description") -> str:
    parts = [f"{description.train} {description.form}"]
    if description.role == "source":
        parts.append(f"{len(description.classes)} classes: {', '.join(description.classes[:12])}")
    tests = f"{description.test} labelled test examples" if description.test else "no test set"
    parts.append(tests)
    if description.gray:
        parts.append(f"gray values {description.gray}")
    lines = [f"{description.path} as a {description.role}: {'; '.join(parts)}"]
    return "\n".join(lines + [f"warning: {text}" for text in description.warnings])


def _lock(state: Path) -> TextIO:
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if state.stat().st_mode & 0o077:  # what lies there tells of images, and one could read it
        with contextlib.suppress(OSError):
            state.chmod(0o700)
        still = "is" if state.stat().st_mode & 0o077 else "was"
        echo(f"warning: {state} {still} open to other accounts; only this one needs it", err=True)
    lock = (state / "lock").open("a+")
    if not system.lock(lock.fileno()):
        lock.close()
        raise ConfigError(
            f"another fedda-client uses {state}: stop it, or give this one its own --state-dir"
        )
    return lock


def _exec_stock(
    config: Mapping[str, bool | int | float | str],
    superlink: str,
    ca: Path | None,
    key: Path | None,
    state: Path,
    lock: TextIO,
) -> None:
    """Become Flower's own SuperNode with the same configuration."""
    os.environ["PATH"] = scripts_first(os.environ.get("PATH"))
    program = shutil.which("flower-supernode")
    if program is None:
        raise ConfigError("flwr's program flower-supernode is not installed: install flwr")
    # A file, because the quoting of flower-supernode's command line cannot express every path.
    node = state / "node.toml"
    settings = {**config, "forgetful": True}.items()
    node.write_text("".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in settings))
    home = state / "flwr"
    home.mkdir(exist_ok=True)
    os.environ["FLWR_HOME"] = str(home)
    command = [program, "--superlink", superlink, "--node-config", str(node)]
    command += ["--port", str(quiet_port())]
    # _check_options has made sure that only an insecure connection has no key.
    command += ["--auth-supernode-private-key", str(key.absolute())] if key else ["--insecure"]
    command += ["--root-certificates", str(ca.absolute())] if ca else []
    os.set_inheritable(lock.fileno(), True)
    sys.stdout.flush()
    os.execv(program, command)
