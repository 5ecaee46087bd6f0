"""`fedda audit`: attack a site's own data, to measure what would be revealed."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.as_json import JsonOption
from fedda.cli.its_files import reads_files
from fedda.contrib.audit import prove
from fedda.contrib.audit.attacker import Attacker, home_of, read_table
from fedda.errors import DataError, FeddaError
from fedda.results.escaping import echo
from fedda.results.read import MODEL, RESULTS

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Reading

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
    attacker = Attacker(run, data, seed, device, reading)
    from fedda.contrib.audit import gradients as attack
    from fedda.contrib.audit import privacy
    from fedda.contrib.audit.subject import opened
    from fedda.data import load_target

    own = attack.SumSettings.of(attacker.config, method)
    given = {"p": p, "min_examples": min_examples, "clip": clip, "noise": noise}
    settings = own.override({k: v for k, v in given.items() if v is not None}, sizes)
    what_if = settings != own or own.method != attacker.config.get("method")
    results = read_table(attacker.home / RESULTS)
    config = attacker.config | {"method": own.method}
    sent = windows or attack.planned(config, results, settings.p)
    model, _, examples, _ = opened(load_target, attacker.file, data, reading)  # no labels
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
    attacker = Attacker(run, data, seed, device, reading)
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
    attacker = Attacker(run, data, seed, device, reading, noise)
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
    attacker = Attacker(run, data, seed, device, reading)
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
    attacker = Attacker(run, data, seed, device, reading)
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
    attacker = Attacker(run, data, seed, device, reading)
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
    proof.finish(attacker.file, attacker.config, attacker.about["data"], attacker.found, options)
