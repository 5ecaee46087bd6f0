"""Who attacks: the attacks of `fedda audit` on one run and one site's data, one after the other."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedda.cli.as_json import print_json
from fedda.config.sections import unflatten, validate
from fedda.errors import RunError, reason
from fedda.files import put
from fedda.halves import load
from fedda.results.escaping import PlainConsole, echo
from fedda.results.progress import clock
from fedda.results.read import RESULTS, model_file

from .finding import FINDINGS, HEADS, Audit

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.contrib.audit.subject import Subject
    from fedda.data import Reading

CONFIG, PICTURES = "config.json", "recovered.png"


class Attacker:
    """Tries attacks on one run and one site, and writes what they find.

    Attributes:
        file: the run's model.
        home: the folder with its results.
        config: its settings.
        device: on which it is attacked.
        about: the site's data and the seed, by name.
        found: what attacks have found so far.
    """

    def __init__(
        self, run: Path, data: Path, seed: int, device: str, reading: "Reading", noise: float = -1.0
    ) -> None:
        self.file, self.home = model_file(run), home_of(run)
        self.config = read_table(self.home / CONFIG)
        if noise >= 0:
            self.config["privacy.noise"] = noise
        self.device = load("clients", "site.memory").pick_device(device)
        self._data, self._seed, self._reading = data, seed, reading
        self.about = {"data": data.resolve().name, "seed": seed}
        self._pictures = False
        self.found: list[Audit] = []

    @cached_property
    def subject(self) -> "Subject":
        """The run's model and the site's labelled data."""
        from fedda.contrib.audit.subject import subject

        return subject(self.file, self.config, self._data, self._reading, self.device, self._seed)

    def update(self, trials: int, steps: int) -> None:
        """Attack a model's update."""
        from fedda.contrib.audit import update as attack

        note = _paced("recovering images from updates")
        found, pictures = attack.invert(
            self.subject, trials=trials, iterations=steps, seed=self._seed, note=note
        )
        self.found.append(found)
        if pictures:
            attack.draw(pictures, self.home / PICTURES)
            self._pictures = True

    def membership(self, shadows: int, epochs: int) -> None:
        """Attack a model and atoms."""
        from fedda.contrib.audit import membership as attack
        from fedda.contrib.audit.subject import atoms_of

        count, atoms = shadows + shadows % 2, atoms_of(self.home)
        epochs = epochs or self.subject.epochs
        found = attack.audit(
            self.subject,
            count=count,
            epochs=epochs,
            atoms=None if atoms is None else atoms[0].flatten(end_dim=-2),
            seed=self._seed,
            note=_paced(f"training {count} models on halves, {epochs} epochs each"),
        )
        self.found.append(found)

    def shares(self, sites: int) -> None:
        """Attack class shares."""
        from fedda.contrib.audit import shares as attack

        _say("telling class shares")
        self.found.append(attack.leaked(self.subject, sites=sites, seed=self._seed))

    def properties(self, sites: int, epochs: int) -> None:
        """Attack moments, the vote's numbers and coordinates, as far as the run has them."""
        from fedda import plugins
        from fedda.contrib.audit import properties as attack
        from fedda.contrib.audit.subject import atoms_of

        _say("telling class shares from moments and numbers")
        settings, atoms = unflatten(self.config), atoms_of(self.home)
        name = str(settings.get("method", ""))
        method = plugins.method(name) if name else None
        found = attack.leaked(
            self.subject,
            method=method,
            options=method and validate(method.config, settings.get(name, {}), name),
            atoms=atoms,
            epochs=epochs or self.subject.epochs,
            sites=sites,
            seed=self._seed,
        )
        self.found.append(found)

    def finish(self, as_json: bool) -> None:
        """Write what was found beside what earlier calls found, and print it."""
        path = self.home / FINDINGS
        for audit in self.found:
            audit.settings.update(self.about)
        found = {audit.attack: audit.to_json() for audit in self.found}
        put(path, json.dumps(read_table(path) | found, indent=1))
        if as_json:
            print_json(found)
        else:
            _print(self.found)
        echo(f"audit: {path}; fedda report shows it", err=as_json)
        if self._pictures:
            echo(f"pictures: {self.home / PICTURES}; they show images of this site", err=as_json)


def _say(text: str) -> None:
    echo(f"{text} ...", err=True)


def _paced(what: str) -> Callable[[float], None]:
    """Say what is begun -> what says how long the rest takes, told the share that is done."""
    began = monotonic()
    _say(what)

    def note(done: float) -> None:
        left = (monotonic() - began) * (1 - done) / done
        if left:
            _say(f"{what}: {done:.0%}, about {clock(left)} left")

    return note


def home_of(run: Path) -> Path:
    """Find the folder with the run's results, given the run, one of its trainings, or a file."""
    folder = run if run.is_dir() else run.parent
    return next((f for f in (folder, folder.parent) if (f / RESULTS).is_file()), folder)


def read_table(file: Path) -> dict[str, Any]:
    """Read a JSON table; empty if the file is missing, as beside a model without its run."""
    try:
        return dict(json.loads(file.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{file} cannot be read ({reason(error)}); give a finished run.") from None


def _print(found: list[Audit]) -> None:
    table = Table(*HEADS, box=box.SIMPLE_HEAD)
    for finding in (finding for audit in found for finding in audit.findings):
        table.add_row(*map(Text, finding.cells()))
    console = PlainConsole()
    console.print(table)
    for line in (line for audit in found for line in audit.remarks()):
        console.print(Text(line))
