"""`fedda audit`: attack a site's own data, to measure what would be revealed.

This module has the attack on gradients; the others are in `fedda.cli.attacks`.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedda.cli import attacks, prove
from fedda.cli.exits import clear_exit
from fedda.cli.its_files import FollowOption, GrayOption, SplitOption, reading_of
from fedda.errors import ConfigError, ModelError
from fedda.files import replacing
from fedda.halves import load as load_folder
from fedda.results.plainly import PlainConsole, echo
from fedda.results.read import MODEL, RESULTS, model_file

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.adversarial.attack import Audit, Leak
    from fedda.data import Reading

CONFIG, AUDIT = "config.json", "audit.json"

app = typer.Typer(no_args_is_help=True, help="Attack a site's own data, as an attacker could.")


@app.callback()
def _group() -> None:
    """Attack a site's own data, as an attacker could; nothing leaves this machine."""


@app.command()
def gradients(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help=f"A finished run's folder, or a {MODEL}.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="A site's data: a folder of images, an .npz file, or a folder with one .npz file.",
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Method whose discriminator is attacked: dils, fada, fdann, fruda, fwdgrl or "
            "mdan. With a method that is not the run's, the figures are a what-if.",
            show_default="the run's",
        ),
    ] = "",
    p: Annotated[
        int | None,
        typer.Option("--p", min=1, help="Steps per window.", show_default="the run's exchange.p"),
    ] = None,
    min_examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Fewest examples of a window that is sent.",
            show_default="the run's exchange.min-examples",
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest norm that a window's mean gradient may have.",
            show_default="the run's exchange.clip",
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Noise per value, in units of the clip.",
            show_default="the run's exchange.noise",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="500,500",
            help="Hidden layers of the discriminator.",
            show_default="the run's METHOD.discriminator.sizes",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100, help="Windows to try of each size.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With noise: number of windows that a site sends; epsilon depends on it.",
            show_default="computed from the run's settings",
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(help="With noise: the delta that belongs to epsilon.")
    ] = 1e-5,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    split: SplitOption = "",
    gray_bits: GrayOption = "auto",
    follow_links: FollowOption = False,
) -> None:
    """Recover features from discriminator gradients, as anybody who sees the exchange could.

    For each unit of the first layer, the gradient of its weights divided by the gradient of its
    bias is a weighted mean of features. This command computes the features that RUN's encoder
    makes of the training examples in DIR, without their labels, and counts how many of them the
    attack recovers: from windows of 1 to 512 examples, with the bare gradient and with the gradient
    as the run would send it. The figures go to audit.json in the run's folder, where `fedda report`
    finds them.

      fedda audit gradients runs/dils --data ./clinic-b

      fedda audit gradients runs/dils --data ./clinic-b --noise 0.001 --sizes 100

    A run whose method has no discriminator revealed nothing in this way. For such a run, --method
    shows what its encoder would reveal in a run of another method, with that method's defaults.
    Figures for another method or for other settings than the run's are called a what-if.

      fedda audit gradients runs/fedavg --data ./clinic-b --method dils
    """
    with clear_exit():
        file, home = model_file(run), attacks.home_of(run)
        config = attacks.read_table(home / CONFIG)
        from fedda.adversarial.attack import Settings

        own = Settings.of(config, method)
        given = {"p": p, "min_examples": min_examples, "clip": clip, "noise": noise}
        settings = own.override({k: v for k, v in given.items() if v is not None}, sizes)
        other = settings != own or own.method != config.get("method")
        results = attacks.read_table(home / RESULTS)
        sent = windows or planned(config | {"method": own.method}, results, settings.p)
        reading = reading_of(split, gray_bits, follow_links=follow_links)
        result = _attack(file, data, settings, trials, seed, device, reading)
        about = result.to_json() | {"data": data.resolve().name, "privacy": None, "what-if": other}
        if settings.noise:
            about["privacy"] = _privacy(settings.noise, sent, delta)
        place = _write(home / AUDIT, about)
        if as_json:
            echo(json.dumps(about, indent=1))
        else:
            _print(result, about)
        echo(f"audit: {place}; fedda report shows it", err=as_json)


app.command()(attacks.update)
app.command()(attacks.membership)
app.command()(attacks.shares)
app.command()(attacks.properties)
app.command("all")(attacks.every)
app.command()(prove.verify)


def planned(config: dict[str, Any], results: dict[str, Any], p: int) -> int:
    """Return the most windows that a site sends in one training, if no round is repeated.

    Where the method has them, this counts rounds that are rounded up to whole windows, a critic's
    extra steps, and a target's windows in its pair with every source or candidate.
    """
    from fedda import plugins
    from fedda.config import unflatten, validate

    sites, method = results.get("sites", []), config.get("method", "")
    most = max((site.get("examples", 0) for site in sites), default=0)
    size, per = config.get("train.batch-size", 50), config.get("train.rounds-per-epoch", 1.0)
    steps, rounds = max(1, math.ceil(most / size / per)), int(config.get("rounds", 1))
    about = plugins.method(method or "fdann")  # a model alone does not say how it was trained
    options: Any = validate(about.config, unflatten(config).get(method, {}), method)
    stages = about.schedule(options, rounds, bool(config.get("run.start-from")))
    summing = max(1, sum(s.last - s.first + 1 for s in stages if s.phase.gradients))
    if method in ("dils", "fruda"):  # their rounds are longer, with a critic longer still
        steps *= options.epochs * options.steps_of_discriminator(p)
    if method == "dils":  # one window may span several rounds
        return max(1, summing * steps // p)
    if method == "fruda":
        adapting = sum(s.last - s.first + 1 for s in stages if s.phase.name == "adapt")
        critics = max(1, len(sites) - 1) + 1  # one per candidate, and one after the adaptation
        return adapting * steps // p + critics * options.measure.steps
    sources = sum(site.get("role") == "source" for site in sites)
    pairs = max(1, sources) if getattr(options, "pairs", False) else 1
    return summing * math.ceil(steps / p) * pairs * getattr(options, "critic_steps", 1)


def _attack(
    file: Path,
    data: Path,
    settings: Any,
    trials: int,
    seed: int,
    device: str,
    reading: "Reading",
) -> "Audit":
    from fedda import models
    from fedda.adversarial import attack
    from fedda.data import load_target

    network, about = models.load(file)
    network.to(load_folder("clients", "site.memory").pick_device(device))
    channels, size = about.shape[:2] if len(about.shape) == 3 else (0, 0)
    reading = reading.within(about.window)
    examples = load_target(  # reads no labels
        data, channels=channels, size=size, resize=about.resize, reading=reading
    )
    if examples.shape != about.shape:
        raise ModelError(
            f"{data} holds examples of {'x'.join(map(str, examples.shape))} and the model takes "
            f"{'x'.join(map(str, about.shape))}; give data that the model was trained for."
        )
    z = attack.features(network, examples.x, seed=seed)
    return attack.audit(z, settings, trials=trials, seed=seed)


def _privacy(noise: float, windows: int, delta: float) -> dict[str, Any]:
    """Return epsilon for one window and for all windows, or why it cannot be computed."""
    from fedda.adversarial import privacy

    about: dict[str, Any] = {"delta": delta, "windows": windows}
    try:
        one, all_ = (privacy.spent(noise, n, delta) for n in (1, windows))
    except ConfigError as error:
        return about | {"missing": str(error)}
    return about | {"one": one._asdict(), "all": all_._asdict()}


def _write(path: Path, about: dict[str, Any]) -> Path:
    with replacing(path) as part:
        part.write_text(json.dumps(about, indent=1))
    return path


def _print(result: "Audit", about: dict[str, Any]) -> None:
    from fedda.page.recovered import parse, remarks

    def text(leak: "Leak | None") -> str:
        if leak is None:
            return "not sent"
        return f"{100 * leak.recovered:.1f} % {leak.cosine:.3f}"

    shown = Table(
        title=Text("features recovered, and mean best cosine", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("window", justify="right")
    heads = ("one batch", "fixed", "moving", "if sent" if about["what-if"] else "as sent")
    for head in (*heads, "norm"):
        shown.add_column(head, justify="right", no_wrap=True)
    for w in result.windows:
        cells = map(text, (w.bare, w.fixed, w.moving, w.sent))
        shown.add_row(str(w.examples), *cells, f"{w.norm:.3g}")
    console = PlainConsole()
    console.print(shown)
    for line in remarks(parse(about)):
        console.print(Text(line))
