"""`fedda audit update`, `membership`, `shares`, `properties` and `all`: attacks on what leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedda.cli.exits import clear_exit
from fedda.cli.its_files import GrayOption, SplitOption, reading_of
from fedda.cli.prove import EvidenceOption, KeyOption, PolicyOption, Proof
from fedda.config import unflatten, validate
from fedda.errors import DataError, FeddaError, RunError
from fedda.files import replacing
from fedda.halves import load as load_folder
from fedda.results.plainly import PlainConsole, echo
from fedda.results.read import RESULTS, model_file

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    import torch

    from fedda.audits.subject import Subject

CONFIG, ATTACKS, PICTURES = "config.json", "attacks.json", "recovered.png"
NOT_TRIED = "not tried"

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A finished run's folder, or a model.safetensors.")
]
DataOption = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="A site's labelled data, which the attacks are tried on; it stays here."
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
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


def update(
    run: RunArgument,
    data: DataOption,
    trials: TrialsOption = 1,
    steps: StepsOption = 200,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
) -> None:
    """Recover images from the change of a model, as the server could that gets it.

    The site takes one step on 1 to 64 of its examples, from the run's last model and from a new one
    after one epoch. The attack looks for images whose gradient points where the model went. Its
    best results are drawn into recovered.png beside the figures: that file shows images of the
    site, so keep it there.

      fedda audit update runs/fedavg --data ./clinic-b
    """
    with clear_exit():
        attacker = _Attacker(run, data, split, gray_bits, device, seed)
        attacker.update(trials, steps)
        attacker.finish(as_json)


def membership(
    run: RunArgument,
    data: DataOption,
    shadows: ShadowsOption = 16,
    epochs: EpochsOption = 0,
    noise: NoiseOption = -1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
) -> None:
    """Tell which examples a model was trained on (LiRA), and whether atoms lie close to them.

    Trains models like the run's, each on another half of the site's examples, and asks of each
    example whether it was among those of one model, by the others. If RUN has atoms and the data
    has labelled tests, it also compares the atoms' distances to training and test images.

      fedda audit membership runs/kd3a --data ./clinic-b --shadows 64

      fedda audit membership runs/kd3a --data ./clinic-b --noise 1
    """
    with clear_exit():
        attacker = _Attacker(run, data, split, gray_bits, device, seed, noise)
        attacker.membership(shadows, epochs)
        attacker.finish(as_json)


def shares(
    run: RunArgument,
    data: DataOption,
    sites: SitesOption = 30,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
) -> None:
    """Tell how many examples of each class a site has, from the change of a model's last layer.

    Half of the data is the attacker's. From the other half, sites with uneven classes are made and
    attacked: by one step, by a round, and by the mean over three sites, which is all that a secure
    sum shows.

      fedda audit shares runs/fedavg --data ./clinic-b
    """
    with clear_exit():
        attacker = _Attacker(run, data, split, gray_bits, device, seed)
        attacker.shares(sites)
        attacker.finish(as_json)


def properties(
    run: RunArgument,
    data: DataOption,
    sites: SitesOption = 30,
    epochs: EpochsOption = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
) -> None:
    """Tell class shares from what crosses besides weights; that needs no labels at the site.

    From BatchNorm's moments, if the model has such layers; from the vote's numbers, if the run's
    method is KD3A; and from FedDaDiL's coordinates, if RUN has atoms. The sites are made of DIR's
    labelled data, as for `shares`.

      fedda audit properties runs/kd3a --data ./clinic-b
    """
    with clear_exit():
        attacker = _Attacker(run, data, split, gray_bits, device, seed)
        attacker.properties(sites, epochs)
        attacker.finish(as_json)


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
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
    evidence: EvidenceOption = None,
    key: KeyOption = None,
    policy: PolicyOption = None,
) -> None:
    """Try every attack on what RUN's sites send, and say beside each what guesses would reach.

    Runs `update`, `membership`, `shares` and `properties`; if the run's method has a discriminator,
    `fedda audit gradients` attacks that. It takes some minutes.

      fedda audit all runs/kd3a --data ./clinic-b

    With --evidence it writes a page for whoever decides about the export: what crossed, the
    attacks and their settings, and what is not protected, signed with the site's key.

      fedda audit all runs/kd3a --data ./clinic-b --evidence e.html --key clinic-b --policy p.toml
    """
    with clear_exit():
        proof = Proof(home_of(run), evidence, key, policy)
        attacker = _Attacker(run, data, split, gray_bits, device, seed)
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
        options = {"trials": trials, "steps": steps, "shadows": shadows, "epochs": epochs}
        options |= {"sites": sites, "seed": seed, "split": split, "gray-bits": gray_bits}
        attacker.prove(proof, options)


class _Attacker:
    """Tries attacks on one run and one site, and writes what they find.

    Args:
        run: the run.
        folder: the site's data.
        split: of the data.
        gray_bits: of the data.
        device: to compute on.
        seed: of every draw.
        noise: in place of the run's `privacy.noise`, unless it is negative.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        split: str,
        gray_bits: str,
        device: str,
        seed: int,
        noise: float = -1.0,
    ) -> None:
        from fedda.audits.subject import subject

        file = self._file = model_file(run)
        self._home = home_of(run)
        config = self._config = read_table(self._home / CONFIG) | (
            {"privacy.noise": noise} if noise >= 0 else {}
        )
        self._settings = unflatten(config)
        self._seed, self._data = seed, folder.resolve().name
        self._pictures = False
        self.found: dict[str, Any] = {}
        chosen = load_folder("clients", "site.memory").pick_device(device)
        self.subject: Subject = subject(
            file, config, folder, reading_of(split, gray_bits), chosen, seed
        )

    def update(self, trials: int, steps: int) -> None:
        """Attack a model's update."""
        from fedda.audits import drawings
        from fedda.audits import update as attack

        _say("recovering images from updates")
        found = attack.invert(self.subject, trials=trials, iterations=steps, seed=self._seed)
        self.found["update"] = attack.to_json(found)
        if found.pictures:
            drawings.pairs(found.pictures, self._home / PICTURES)
            self._pictures = True

    def membership(self, shadows: int, epochs: int) -> None:
        """Attack a model and atoms."""
        from fedda.audits import membership as attack

        epochs = epochs or self._epochs
        phi, inside = attack.shadows(
            self.subject,
            shadows + shadows % 2,
            epochs,
            self._seed,
            lambda done: _say(f"training {shadows + shadows % 2} models on halves: {done}"),
        )
        lira = attack.told(attack.scores(phi, inside), inside)
        plain = attack.told(phi, inside)
        about: dict[str, Any] = {"shadows": len(phi), "epochs": epochs, "examples": phi.shape[1]}
        about["noise"] = self.subject.privacy.noise
        self.found["membership"] = about | {"lira": vars(lira), "confidence": vars(plain)}
        if (atoms := self._atoms()) is not None and self.subject.held is not None:
            import torch

            points = atoms[0].flatten(end_dim=-2)
            with torch.no_grad():
                z, held = (
                    self.subject.model.eval().features(x).flatten(1).cpu()
                    for x in (self.subject.x, self.subject.held[0])
                )
            if z.shape[1] == points.shape[1]:
                self.found["atoms"] = vars(attack.near(z, held, points)) | {"atoms": len(points)}

    def shares(self, sites: int) -> None:
        """Attack class shares."""
        from fedda.audits import shares as attack

        _say("telling class shares")
        self.found["shares"] = vars(attack.leaked(self.subject, sites=sites, seed=self._seed))

    def properties(self, sites: int, epochs: int) -> None:
        """Attack moments, the vote's numbers and coordinates, as far as the run has them."""
        from fedda.algorithms import feddadil, kd3a
        from fedda.audits import properties as attack

        _say("telling class shares from moments and numbers")
        options, dictionary = (
            validate(module.Config, self._settings.get(name, {}), name)
            for name, module in (("kd3a", kd3a), ("feddadil", feddadil))
        )
        atoms = self._atoms()
        found = attack.leaked(
            self.subject,
            options=options if self._settings.get("method") == "kd3a" else None,
            atoms=None if atoms is None else (*atoms, dictionary),
            epochs=epochs or self._epochs,
            sites=sites,
            seed=self._seed,
        )
        self.found["properties"] = vars(found)

    @property
    def _epochs(self) -> int:
        """How many passes over its examples a site made in the run."""
        return max(1, round(self.subject.rounds / self.subject.train.rounds_per_epoch))

    def finish(self, as_json: bool) -> None:
        """Write what was found beside what earlier calls found, and print it."""
        from fedda.page.attacked import parse, rows

        path = self._home / ATTACKS
        about = (read_table(path) if path.is_file() else {}) | self.found
        about |= {"data": self._data, "seed": self._seed}
        with replacing(path) as part:
            part.write_text(json.dumps(about, indent=1))
        if as_json:
            echo(json.dumps(self.found, indent=1))
        else:
            _print(rows(parse(self.found | {"data": self._data})))
        echo(f"audit: {path}; fedda report shows it", err=as_json)
        if self._pictures:
            shown = self._home / PICTURES
            echo(f"pictures: {shown}; they show images of this site", err=as_json)

    def prove(self, proof: Proof, options: dict[str, Any]) -> None:
        """Make evidence of what was found with these options."""
        proof.finish(self._file, self._config, self._data, self.found, options)

    def _atoms(self) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """The run's atoms: points (K, n, d) and labels (K, n, C); None if it has none."""
        import torch

        checkpoint = load_folder("server", "checkpoint")
        for facts in sorted(self._home.glob("*/checkpoint.json")):
            state = checkpoint.read(facts.parent)
            if state is not None and "atoms" in state.arrays:
                atoms = state.arrays["atoms"].unpack()
                z, y = (torch.tensor(atoms[name]).float() for name in "zy")
                return z, y / y.sum(dim=2, keepdim=True)
        return None


def _say(text: str) -> None:
    echo(f"{text} ...", err=True)


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
        raise RunError(f"{file} cannot be read ({error}); give a finished run.") from None


def _print(found: list[tuple[str, str, str, str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("attack", "recovers", "by guesses", "what closes it"):
        table.add_column(head)
    for row in found:
        table.add_row(*map(Text, row))
    PlainConsole().print(table)
