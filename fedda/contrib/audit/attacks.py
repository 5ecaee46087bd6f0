"""`fedda audit`: attack a site's own data, to measure what would be revealed."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedda.cli.as_json import JsonOption, print_json
from fedda.cli.its_files import reads_files
from fedda.config.sections import unflatten, validate
from fedda.contrib.audit import prove
from fedda.contrib.audit.finding import FINDINGS, HEADS, Audit
from fedda.errors import DataError, FeddaError, RunError, reason
from fedda.files import put
from fedda.halves import load as load_folder
from fedda.results.escaping import PlainConsole, echo
from fedda.results.progress import clock
from fedda.results.read import MODEL, RESULTS, model_file

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.contrib.audit.subject import Subject
    from fedda.data import Reading

CONFIG, PICTURES = "config.json", "recovered.png"
NOT_TRIED = "not tried"

app = typer.Typer(no_args_is_help=True, help="Attack a site's own data, as an attacker could.")

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help=f"A finished run's folder, or a {MODEL}.")
]
DataOption = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="A site's labelled data, which the attacks are tried on; it stays here."
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]
TrialsOption = Annotated[int, typer.Option(min=1, help="Updates to try of each size.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Steps of the attack on an update.")]
ShadowsOption = Annotated[int, typer.Option(min=4, help="Models to train; an even number.")]
EpochsOption = Annotated[
    int, typer.Option(min=0, help="Epochs of each.", show_default="as many as the run's")
]
NoiseOption = Annotated[
    float,
    typer.Option(
        help="What if the site trained with so much privacy.noise?",
        show_default="the run's privacy.noise",
    ),
]
SitesOption = Annotated[int, typer.Option(min=3, help="Made sites to attack.")]


@app.callback()
def _group() -> None:
    """Attack a site's own data, as an attacker could; nothing leaves this machine."""


@app.command()
@reads_files
def gradients(
    run: RunArgument,
    data: Annotated[Path, typer.Option(metavar="DIR")],
    method: Annotated[str, typer.Option(metavar="METHOD", show_default="the run's")] = "",
    p: Annotated[
        int | None, typer.Option("--p", min=1, show_default="the run's exchange.p")
    ] = None,
    min_examples: Annotated[
        int | None, typer.Option(min=1, show_default="the run's exchange.min-examples")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(min=0, show_default="the run's exchange.clip")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(min=0, show_default="the run's exchange.noise")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="500,500", show_default="the run's METHOD.discriminator.sizes"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100)] = 5,
    seed: SeedOption = 0,
    windows: Annotated[
        int | None, typer.Option(min=1, show_default="computed from the run's settings")
    ] = None,
    delta: float = 1e-5,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Recover features from discriminator gradients, as anybody who sees the exchange could.

    For each unit of the first layer, the gradient of its weights divided by the gradient of its
    bias is a weighted mean of features. This command computes the features that RUN's encoder
    makes of the training examples in DIR, without their labels, and counts how many of them the
    attack recovers: from windows of 1 to 512 examples, with the bare gradient and with the gradient
    as the run would send it. The figures go to findings.json in the run's folder, where `fedda
    report` finds them.

      fedda audit gradients runs/dils --data ./clinic-b

      fedda audit gradients runs/dils --data ./clinic-b --noise 0.001 --sizes 100

    A run whose method has no discriminator revealed nothing in this way. For such a run, --method
    shows what its encoder would reveal in a run of another method, with that method's defaults.
    Figures for another method or for other settings than the run's are called a what-if.

      fedda audit gradients runs/fedavg --data ./clinic-b --method dils

    Options:
        data: A site's data: a folder of images, an .npz file, or a folder with one .npz file.
        method: Method whose discriminator is attacked, such as fdann or dils. With a method that is
            not the run's, the figures are a what-if.
        p: Steps per window.
        min_examples: Fewest examples of a window that is sent.
        clip: Largest norm that a window's mean gradient may have.
        noise: Noise per value, in units of the clip.
        sizes: Hidden layers of the discriminator.
        trials: Windows to try of each size.
        windows: With noise: number of windows that a site sends; epsilon depends on it.
        delta: With noise: the delta that belongs to epsilon.
    """
    attacker = _Attacker(run, data, seed, device, reading)
    from fedda.contrib.audit import gradients as attack
    from fedda.contrib.audit import privacy
    from fedda.contrib.audit.subject import opened
    from fedda.data import load_target

    own = attack.SumSettings.of(attacker.config, method)
    given = {"p": p, "min_examples": min_examples, "clip": clip, "noise": noise}
    settings = own.override({k: v for k, v in given.items() if v is not None}, sizes)
    what_if = settings != own or own.method != attacker.config.get("method")
    results = read_table(home_of(run) / RESULTS)
    config = attacker.config | {"method": own.method}
    sent = windows or attack.planned(config, results, settings.p)
    model, _, examples, _ = opened(load_target, model_file(run), data, reading)  # no labels
    z = attack.features(model.to(attacker.device), examples.x, seed=seed)
    found = attack.audit(z, settings, trials=trials, seed=seed, what_if=what_if)
    if settings.noise:
        found.settings["privacy"] = privacy.spent(settings.noise, sent, delta)
    attacker.found.append(found)
    attacker.finish(as_json)


@app.command()
@reads_files
def update(
    run: RunArgument,
    data: DataOption,
    trials: TrialsOption = 1,
    steps: StepsOption = 200,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Recover images from the change of a model, as the server could that gets it.

    The site takes one step on 1 to 64 of its examples, from the run's last model and from a new one
    after one epoch. The attack looks for images whose gradient points where the model went. Its
    best results are drawn into recovered.png beside the figures: that file shows images of the
    site, so keep it there.

      fedda audit update runs/fedavg --data ./clinic-b
    """
    attacker = _Attacker(run, data, seed, device, reading)
    attacker.update(trials, steps)
    attacker.finish(as_json)


@app.command()
@reads_files
def membership(
    run: RunArgument,
    data: DataOption,
    shadows: ShadowsOption = 16,
    epochs: EpochsOption = 0,
    noise: NoiseOption = -1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Tell which examples a model was trained on (LiRA), and whether atoms lie close to them.

    Trains models like the run's, each on another half of the site's examples, and asks of each
    example whether it was among those of one model, by the others. If RUN has atoms and the data
    has labelled tests, it also compares the atoms' distances to training and test images.

      fedda audit membership runs/kd3a --data ./clinic-b --shadows 64

      fedda audit membership runs/kd3a --data ./clinic-b --noise 1
    """
    attacker = _Attacker(run, data, seed, device, reading, noise)
    attacker.membership(shadows, epochs)
    attacker.finish(as_json)


@app.command()
@reads_files
def shares(
    run: RunArgument,
    data: DataOption,
    sites: SitesOption = 30,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Tell how many examples of each class a site has, from the change of a model's last layer.

    Half of the data is the attacker's. From the other half, sites with uneven classes are made and
    attacked: by one step, by a round, and by the mean over three sites, which is all that a secure
    sum shows.

      fedda audit shares runs/fedavg --data ./clinic-b
    """
    attacker = _Attacker(run, data, seed, device, reading)
    attacker.shares(sites)
    attacker.finish(as_json)


@app.command()
@reads_files
def properties(
    run: RunArgument,
    data: DataOption,
    sites: SitesOption = 30,
    epochs: EpochsOption = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Tell class shares from what crosses besides weights; that needs no labels at the site.

    From BatchNorm's moments, if the model has such layers; from the vote's numbers, if the run's
    method is KD3A; and from FedDaDiL's coordinates, if RUN has atoms. The sites are made of DIR's
    labelled data, as for `shares`.

      fedda audit properties runs/kd3a --data ./clinic-b
    """
    attacker = _Attacker(run, data, seed, device, reading)
    attacker.properties(sites, epochs)
    attacker.finish(as_json)


@app.command("all")
@reads_files
def every(
    run: RunArgument,
    data: DataOption,
    trials: TrialsOption = 1,
    steps: StepsOption = 200,
    shadows: ShadowsOption = 16,
    epochs: EpochsOption = 0,
    sites: SitesOption = 30,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
    evidence: prove.EvidenceOption = None,
    policy: prove.PolicyOption = None,
) -> None:
    """Try every attack on what RUN's sites send, and say beside each what guesses would reach.

    Runs `update`, `membership`, `shares` and `properties`; if the run's method has a discriminator,
    `fedda audit gradients` attacks that. It says on the way how long it still takes: most is to
    train --shadows models, each for --epochs.

      fedda audit all runs/kd3a --data ./clinic-b

    With --evidence it writes a page for whoever decides about the export: what crossed, the
    attacks and their settings, and what is not protected.

      fedda audit all runs/kd3a --data ./clinic-b --evidence e.html --policy p.toml
    """
    proof = prove.Proof(home_of(run), evidence, policy)
    attacker = _Attacker(run, data, seed, device, reading)
    attacker.subject  # noqa: B018  # what cannot be read is refused before any attack
    tries: list[Callable[[], None]] = [
        lambda: attacker.update(trials, steps),
        lambda: attacker.membership(shadows, epochs),
        lambda: attacker.shares(sites),
        lambda: attacker.properties(sites, epochs),
    ]
    for attack in tries:
        try:
            attack()
        except FeddaError as error:
            echo(f"{NOT_TRIED}: {error}", err=True)
    if not attacker.found:
        raise DataError("No attack could be tried on these data; see above.")
    attacker.finish(as_json)
    options = {"trials": trials, "steps": steps, "shadows": shadows}
    made = attacker.subject.epochs
    options |= {"epochs": epochs or made, "epochs-of-the-run": made}
    options |= {"sites": sites, "seed": seed, **reading.flat()}
    attacker.prove(proof, options)


class _Attacker:
    """Tries attacks on one run and one site, and writes what they find."""

    def __init__(
        self,
        run: Path,
        folder: Path,
        seed: int,
        device: str,
        reading: "Reading",
        noise: float = -1.0,
    ) -> None:
        self._file, self._home = model_file(run), home_of(run)
        self.config = read_table(self._home / CONFIG)
        if noise >= 0:
            self.config["privacy.noise"] = noise
        self.device = load_folder("clients", "site.memory").pick_device(device)
        self._folder, self._seed, self._reading = folder, seed, reading
        self._about = {"data": folder.resolve().name, "seed": seed}
        self._pictures = False
        self.found: list[Audit] = []

    @cached_property
    def subject(self) -> "Subject":
        """The run's model and the site's labelled data."""
        from fedda.contrib.audit.subject import subject

        about = self._file, self.config, self._folder, self._reading
        return subject(*about, self.device, self._seed)

    def update(self, trials: int, steps: int) -> None:
        """Attack a model's update."""
        from fedda.contrib.audit import drawings
        from fedda.contrib.audit import update as attack

        note = _paced("recovering images from updates")
        found, pictures = attack.invert(
            self.subject, trials=trials, iterations=steps, seed=self._seed, note=note
        )
        self.found.append(found)
        if pictures:
            drawings.pairs(pictures, self._home / PICTURES)
            self._pictures = True

    def membership(self, shadows: int, epochs: int) -> None:
        """Attack a model and atoms."""
        from fedda.contrib.audit import membership as attack
        from fedda.contrib.audit.subject import atoms_of

        count, atoms = shadows + shadows % 2, atoms_of(self._home)
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
        settings, atoms = unflatten(self.config), atoms_of(self._home)
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
        path = self._home / FINDINGS
        for audit in self.found:
            audit.settings.update(self._about)
        found = {audit.attack: audit.to_json() for audit in self.found}
        table = (read_table(path) if path.is_file() else {}) | found
        put(path, json.dumps(table, indent=1))
        if as_json:
            print_json(found)
        else:
            _print(self.found)
        echo(f"audit: {path}; fedda report shows it", err=as_json)
        if self._pictures:
            shown = self._home / PICTURES
            echo(f"pictures: {shown}; they show images of this site", err=as_json)

    def prove(self, proof: prove.Proof, options: dict[str, Any]) -> None:
        """Make evidence of what was found with these options."""
        proof.finish(self._file, self.config, self._about["data"], self.found, options)


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
