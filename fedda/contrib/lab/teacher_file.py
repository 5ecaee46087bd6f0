"""`fedda teacher`: make the file of a teacher that a target already has."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.its_files import reads_files
from fedda.cli.predict import rows, write
from fedda.errors import ConfigError
from fedda.halves import load

if TYPE_CHECKING:
    from fedda.data import Reading

app = typer.Typer(
    help="Make the file of a teacher for `fedda-client --teacher`. Of a model of fedda's, "
    "`fedda predict` makes it.",
    no_args_is_help=True,
)
BLANK = "{}"


@app.callback()
def several() -> None:
    """One command for each kind of teacher."""


@app.command()
@reads_files
def clip(
    data: Annotated[Path, typer.Argument(metavar="DIR")],
    classes: Annotated[str, typer.Option(metavar="A,B,..")],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", dir_okay=False)],
    network: str = "ViT-B-32",
    weights: Annotated[str, typer.Option(metavar="FILE|NAME")] = "laion2b_s34b_b79k",
    sentence: Annotated[list[str] | None, typer.Option(show_default=False)] = None,
    called: Annotated[list[str] | None, typer.Option(metavar="CLASS=WORDS")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    device: str = "auto",
    *,
    reading: "Reading",
) -> None:
    """Ask a network that knows pictures and words (CLIP) for the classes of a target's images.

    Nothing is trained and nothing leaves this machine; the weights must be on it. Needs the extra
    fedda[clip]. Where pictures are everyday ones, such a network alone is often better than what
    sites learn together: test its answers first, then let it teach.

      fedda teacher clip ./photos --classes "bike,mug,monitor" --out clip.csv
      fedda-client --role target --data ./photos --teacher clip.csv --superlink hub:8443 ...

    Options:
        data: The target's images.
        classes: The classes of the run, as the sources call them.
        out: Where it goes.
        network: A network of open_clip.
        weights: Its weights: a file, or a name that open_clip has at hand.
        sentence: What a picture of a class {} may be called; repeat it for several. Default: 'a
            photo of a {}.'
        called: Words for a class whose name says little, as 3=backpack; repeat it.
        batch: Images at a time.
        device: auto, cpu or cuda:N.
    """
    names = [name.strip() for name in classes.split(",") if name.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"--classes is {classes!r}; give two or more different names.")
    words = _words(names, called or [])
    forms = sentence or ["a photo of a {}."]
    if odd := [form for form in forms if BLANK not in form]:
        raise ConfigError(f"--sentence {odd[0]!r} has no place for the class; write {{}} there.")
    from fedda.contrib.lab.clip import zero_shot

    chosen = load("clients", "site.memory").pick_device(device)
    sentences = [[form.replace(BLANK, words[name]) for form in forms] for name in names]
    found = zero_shot(network, weights, sentences, data, batch, chosen, reading)
    write(rows(names, found), out)


def _words(names: list[str], called: list[str]) -> dict[str, str]:
    """What each class is called in a sentence."""
    words = {name: name.replace("_", " ") for name in names}
    for pair in called:
        name, separator, text = pair.partition("=")
        if not separator or name not in words or not text.strip():
            raise ConfigError(
                f"--called {pair!r} is not CLASS=WORDS with a class of --classes "
                f"({', '.join(names)})."
            )
        words[name] = text.strip()
    return words
