"""`fedda data benchmarks` and `fedda data import`: published benchmarks as folders of sites."""

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from fedda.cli.data import bar, degrees
from fedda.config import DEFAULT
from fedda.errors import typed
from fedda.results.escaping import PlainConsole, echo

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.contrib.benchmarks.common import Benchmark
    from fedda.contrib.benchmarks.write import Result


def benchmarks(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this one.", show_default=False)
    ] = None,
) -> None:
    """List the published benchmarks that can be imported, and where their files are.

    fedda data benchmarks

    fedda data benchmarks digit5
    """
    from fedda.contrib.benchmarks.registry import BENCHMARKS, find

    chosen = [find(name)] if name else list(BENCHMARKS.values())
    echo("\n\n".join(_about(benchmark) for benchmark in chosen))


def import_(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    domains: Annotated[str, typer.Option(metavar="A,B", show_default=False)] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    test_share: float | None = None,
    transductive: Annotated[bool, typer.Option("--transductive")] = False,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    test_limit: Annotated[int | None, typer.Option(min=1)] = None,
    files: Literal["link", "symlink", "copy"] | None = None,
    features: Annotated[int | None, typer.Option(min=1)] = None,
    angles: Annotated[str, typer.Option(metavar="0,30,..")] = "",
    mels: Annotated[int | None, typer.Option(min=1)] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, max=60)] = None,
) -> None:
    """Turn a benchmark's published files into one site folder per domain.

    Nothing is downloaded: get the files from their authors (`fedda data benchmarks` says where).
    Images stay as they are. NAME is one of

      digit5, office31, office-caltech10, office-home, domainnet, imageclef, adaptiope, pacs,

      amazon-review, rotated-mnist,

      mic2mic-like: spectrograms like Mic2Mic's, from your own recordings, not Mic2Mic's.

    fedda data import digit5 ./Digit-Five ./digit5 --limit 25000 --test-limit 9000

    fedda data import office31 ./office31-raw ./office31 --transductive

    fedda run kd3a --simulate ./office31 --target amazon --preset office31

    Options:
        name: See `fedda data benchmarks`.
        source: The folder with the published files.
        out: A new or empty folder to write the domains to.
        domains: Only these domains.
        seed: Seed of every random draw.
        test_share: Share of every class to test on, where no split is published. [0.2]
        transductive: Use every example for training (without labels at a target) and for testing.
        limit: Most training examples per domain.
        test_limit: Most test examples per domain.
        files: Images: hard links (or copies, if on another disk), symbolic links or copies.
        features: Vectors: number of first columns to keep.
        angles: Rotated MNIST: degrees clockwise.
        mels: Recordings: mel bands. [40]
        seconds: Recordings: length in seconds. [1.0]
    """
    from fedda.contrib.benchmarks.common import Options
    from fedda.contrib.benchmarks.registry import import_benchmark

    options = Options(
        domains=tuple(part.strip() for part in domains.split(",")) if domains else None,
        seed=seed,
        test_share=test_share,
        transductive=transductive,
        limit=limit,
        test_limit=test_limit,
        files=files,
        features=features,
        angles=degrees(angles) if angles else None,
        mels=mels,
        seconds=seconds,
    )
    with bar("writing") as progress:
        done = import_benchmark(name, source, out, options, progress)
    _print_result(done)


def _about(benchmark: "Benchmark") -> str:
    classes = benchmark.classes
    rows = {
        "domains": ", ".join(benchmark.domains) or "one per folder",
        "classes": str(classes) if isinstance(classes, int) else ", ".join(classes),
        "layout": benchmark.layout,
        "split": benchmark.split.format(seed=0),
        "used by": benchmark.used_by,
        "files": benchmark.url,
    }
    lines = [f"{benchmark.name}: {benchmark.title}"]
    for head, text in rows.items():
        wrapped = wrap(text, 86, break_on_hyphens=False, break_long_words=False)
        lines += [f"  {head:<8} {wrapped[0]}", *(f"{'':11}{line}" for line in wrapped[1:])]
    return "\n".join(lines)


def _print_result(done: "Result") -> None:
    table = Table("domain", "training", "test")
    for domain, (train, test) in done.counts.items():
        table.add_row(escape(domain), str(train), str(test))
    console = PlainConsole()
    console.print(table)
    echo(f"{done.classes} classes; {done.split}")
    for note in done.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    its = "--simulate", done.out, "--target", next(iter(done.counts)), *done.settings
    echo(f"next: {typed('fedda', 'run', DEFAULT, *its)}")
