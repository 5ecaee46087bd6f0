"""One run over sites of this machine: for the command line, and as a function of the library."""

import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from fedda.config import DEFAULT
from fedda.config.inputs import REFUSE, categories_of
from fedda.config.sections import Flat, validate
from fedda.data import Description, Reading, Role, describe, leaks, passed_over, state_of
from fedda.data.categories import LEAVING, alone
from fedda.data.naming import listed
from fedda.data.pixels import RESIZED
from fedda.data.sets import FILLING
from fedda.errors import ConfigError, FeddaError, RunError
from fedda.files import put
from fedda.halves import load
from fedda.ops.engines import check_engine
from fedda.results import read
from fedda.results.escaping import visible
from fedda.results.progress import Display
from fedda.results.read import JOURNAL
from fedda.settings import RunConfig, as_arguments, named

from . import own_data, own_model
from .beginning import Launch, beginning, new_settings
from .outcome import Run
from .unchanged import unchanged

Sites = str | Path | Mapping[str, Any]

DATA = "data"  # in a run's folder: the files of sites that a program brought as arrays
FILES = "files.json"  # there, too: which files all others had when it began
INSTEAD = {
    "method": "method",
    "run.look": "the command fedda look",
    "run.dir": "dir",
    "run.name": "dir",
    "run.resume": "resume",
    "run.seeds": "seeds",
    "run.baseline": "baseline",
    "run.start-from": "start_from",
    "run.target": "target",
    "model.name": "network",
}


def execute(
    config: RunConfig,
    launch: Launch,
    *listeners: Callable[[dict[str, Any]], None],
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Run over the folders that a launch names -> the content of results.json.

    Args:
        config: the run.
        launch: where its data are, and how it is computed.
        listeners: called with every event, such as a display of the progress.
        say: called with a sentence about a site's data, of those that `fedda data check` says.

    Raises:
        FeddaError: data, settings or sites do not fit together, or the run failed.
    """
    local, journals = load("server", "simulation"), load("server", "journal")
    poison = poison_of(launch.poison)
    reading = Reading.said(launch.model_dump(by_alias=True))
    if reading.gray_bits and not config.input.window:  # so that the model's file holds it
        seen = config.input.model_copy(update={"window": f"{reading.gray_bits} bits"})
        config = config.model_copy(update={"input": seen})
    root = Path(launch.simulate)
    if odd := passed_over(root, reading, {launch.target, *launch.target.split(",")}):
        say(odd)
    found = local.folders(root, launch.target, poison, launch.threads, reading)
    if chosen := config.sources:  # the data of others need not be readable
        found = [site for site in found if site["role"] == "target" or site["name"] in chosen]
    device = load("clients", "site.memory").pick_device(launch.device)
    of_all = {} if launch.device == "auto" else {"device": launch.device}
    sites = [site | reading.at(site["name"]).flat() | of_all for site in found]
    if launch.teacher:
        targets = [site for site in sites if site["role"] == "target"]
        if len(targets) > 1:
            raise ConfigError(
                f"{launch.teacher} is the teacher of one target, and the run has {len(targets)}; "
                "name one target."
            )
        targets[0]["teacher"] = launch.teacher
    names, empty = {site["data"]: site["name"] for site in sites}, list[set[str]]()
    texts: dict[str, tuple[str, ...]] = {}

    def described(path: str, role: Role, reading: Reading) -> Description:
        """Describe a site's data, and say what is odd about them."""
        about = describe(path, role, reading)
        resizes = config.input.size or config.model.weights != "none"  # to the weights' own
        fills = config.input.missing != REFUSE
        settled = (RESIZED,) * bool(resizes) + (FILLING,) * fills
        settled += (LEAVING,) * bool(config.input.categories)
        for text in about.warnings:
            if not text.endswith(settled):
                say(f"{names[path]}: {text}")
        empty.append({*about.empty})
        texts[names[path]] = about.texts
        return about

    # Else the run would wait for a site that cannot answer.
    classes = local.rehearse(config, sites, described)
    if nowhere := sorted(set[str].intersection(*empty)):
        say(f"no site has a value in {listed(nowhere)}: leave such columns out at all sites")
    for text in [*alone(texts, categories_of(config.input.categories)), *leaks(sites)]:
        say(text)
    for site in sites:
        if file := site.get("teacher"):
            about = Path(file), "target", Path(site["data"]), reading, device, classes
            load("clients", "site.teacher").checked(*about)  # a site would only say so in its log
    folder = Path(config.run.dir) / config.run.name
    _check_files(folder, names, config.run.resume)
    journal = journals.Journal(folder / JOURNAL, *listeners)
    with journal.ending():
        return local.simulate(config, sites, journal, launch.engine)


def _check_files(folder: Path, names: Mapping[str, str], resume: bool) -> None:
    """Note which files the sites of a new run have, by path; refuse others when it goes on.

    Raises:
        RunError: files have changed since.
    """
    paths = [Path(path) for path in names if (folder / DATA).resolve() not in Path(path).parents]
    now, note = {names[str(path)]: state_of(path) for path in paths}, folder / FILES
    if not resume:
        put(note, json.dumps(now))
    elif odd := [n for n, was in (read.noted(note) or {}).items() if now.get(n, was) != was]:
        raise RunError(
            f"The data of {listed(odd)} have changed since {folder} was begun; put the former "
            "files back, or begin a new run with another --name."
        )


def simulate(
    data: Sites,
    target: str | Sequence[str],
    method: str = DEFAULT,
    seeds: int | Sequence[int] = (0,),
    preset: str | Sequence[str] | None = None,
    dir: str | Path | None = None,
    *,
    network: own_model.Network | None = None,
    baseline: str = "",
    start_from: str | Path | None = None,
    poison: Mapping[str, float] | None = None,
    engine: Literal["process", "ray"] = "process",
    threads: int = 1,
    device: str = "auto",
    split: str = "",
    gray_bits: int | str = "auto",
    skip_broken: bool = False,
    follow_links: bool = False,
    columns: str = "",
    teacher: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a method over sites of this machine, without a server.

        import fedda

        run = fedda.simulate("digits", target="fonts", rounds=10, input_size=16, input_channels=1)
        run.results.accuracy  # of the target's tests, after the last round
        run.model.predict(images)  # a class name per image

    It gives the numbers of `fedda run --simulate` with the same data, settings and seeds, to the
    last bit, and leaves no setting of this process changed: environment, logging, random
    generators and torch's threads are as before.

    Args:
        data: A folder with a folder or .npz file per site; or a dict with the sites by name. Such a
            site is (x, y), or (x, y, (x_test, y_test)), or a `torch.utils.data.Dataset` of
            (x, label), or two of them (training, test), or a folder. x are images as
            (N, H, W), (N, H, W, 3) or (N, 3, H, W), of whole numbers up to 255 or floats up to 1,
            or vectors (N, d), as numpy arrays or torch tensors; y are whole numbers from 0, or
            class names, or None at a target.
        target: The site that has no labels, or several; the others are sources. A target's test
            gives the accuracies; without one there are none.
        method: `fedda methods` lists them.
        seeds: One training per seed; a number n means 0 to n - 1.
        preset: Named settings, or several of which the last one wins; `settings` win over all.
        dir: The folder of this run's results; by default a temporary one that is removed when
            the run is no longer used.
        network: A function that takes the shape of one input, (channels, H, W) or (d,), and makes
            a `torch.nn.Module` that turns a batch of them, as floats from 0 to 1, into rows of
            features; fedda adds the layer that classifies. It makes a new module at every call.
            It runs in this process only: for a run over a network of machines, it must be
            installed at every site as a package with an entry point `fedda.models`.
        baseline: A method to train on the same seeds for comparison, or `none`; by default
            `fedavg`, or none with `start_from`.
        start_from: A finished run's folder, or a model file, whose model to start from.
        poison: Percent of labels to flip, by source.
        engine: `process`: one site after the other; `ray`: Flower's simulation.
        threads: CPU threads of a site; with another number the last bits may differ.
        device: `auto`, which takes the first GPU if there is one, `cpu` or `cuda:N`.
        split: The part of the data to train on, if not `train`.
        gray_bits: Significant bits of images with 16 bits of gray, or `auto`.
        skip_broken: Pass over images that cannot be read.
        follow_links: Read also what links and paths in tables name outside of a site's folder.
        columns: What tables call their columns, as `path=filename,label=diagnosis`.
        teacher: A file of what the target's own teacher says of its images, or a model's file, as
            `fedda-client --teacher` takes it.
        resume: Go on with the interrupted run in `dir`, with the same arguments.
        quiet: Show no progress.
        settings: All other settings of a run, by the names that `fedda settings` lists, with `_`
            in place of `.` and `-`: `train_lr=.01`, `rounds=5`. No two settings are called the
            same then. A method's own need not begin with its name: `gate_low=.8`. A dict with the
            command line's names is given as `**{"train.lr": .01}`.

    Returns:
        The finished run.

    Raises:
        ConfigError: A setting is unknown, or settings contradict each other.
        DataError: A site's data cannot be used.
        RosterError: The sites do not fit together.
        RunError: `dir` holds a run already, or the run failed.
    """
    if network is not None and engine == "ray":
        raise ConfigError(
            "network is a function of this process, and engine='ray' starts other ones; leave one "
            "of them out, or install the network as a package with an entry point fedda.models."
        )
    if resume and dir is None:
        raise ConfigError("resume needs the folder of an interrupted run; give it as dir.")
    check_engine(engine)
    own = named(method, settings)
    refuse_arguments(own, {k: v for k, v in INSTEAD.items() if network or v != "network"})
    given: Flat = {
        "run.seeds": ",".join(map(str, chosen_seeds(seeds))),
        "run.start-from": str(Path(start_from).absolute()) if start_from else "",
    }
    changes = own_model.settings_of(network) | own
    flat = new_settings(method, several(preset), given, baseline, changes)
    with ExitStack() as stack:
        stack.enter_context(unchanged())
        stack.enter_context(own_model.lent(network))
        folder, scratch = stack.enter_context(placed(dir))
        in_words = stack.enter_context(worded(data, folder / DATA))
        flat |= {"run.dir": str(folder.parent), "run.name": folder.name, "run.resume": resume}
        config = RunConfig.parse(flat)
        targets = [target] if isinstance(target, str) else list(target)
        launch = validate(
            Launch,
            dict(
                target=",".join(targets),
                engine=engine,
                poison=",".join(f"{name}={percent}" for name, percent in (poison or {}).items()),
                threads=threads,
                device=device,
                split=split,
                gray_bits=gray_bits,
                skip_broken=skip_broken,
                follow_links=follow_links,
                columns=columns,
                teacher="" if teacher is None else str(Path(teacher).absolute()),
            ),
        )
        with nullcontext() if resume else beginning(config, launch):
            root = own_data.folder_of(data, folder / DATA, targets)
            launch = launch.model_copy(update={"simulate": str(root)})
            with nullcontext() if quiet else Display(config, words=in_words) as display:
                shown = [] if display is None else [display]
                execute(
                    config, launch, *shown, say=lambda text: None if quiet else note(in_words(text))
                )
    run = Run(folder, network)
    if scratch:
        weakref.finalize(run, shutil.rmtree, scratch, ignore_errors=True)
    return run


def poison_of(text: str) -> dict[str, float]:
    """The percent of wrong labels by site, from `svhn=30,mnist=5`."""
    percents: dict[str, float] = {}
    for pair in filter(None, text.split(",")):
        name, _, percent = pair.partition("=")
        try:
            percents[name] = float(percent)
        except ValueError:
            percents[name] = -1.0
        if not 0 < percents[name] <= 100:
            raise ConfigError(f"--poison {pair!r} is not NAME=PERCENT; give for example svhn=30.")
    return percents


def note(text: str) -> None:
    print(f"note: {visible(text)}", file=sys.stderr)


@contextmanager
def placed(dir: str | Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Give the folder of a run's results, and the temporary folder that it is in, if it is.

    That is removed if the `with` block fails.
    """
    if dir is not None:
        yield Path(dir).absolute(), None
        return
    scratch = Path(tempfile.mkdtemp(prefix="fedda-"))
    try:
        yield scratch / "run", scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@contextmanager
def worded(data: Sites, place: Path) -> Iterator[Callable[[str], str]]:
    """Let errors call a program's sites and settings as the program does -> what does so.

    Args:
        data: the sites.
        place: where files of theirs are.
    """

    def in_words(text: str) -> str:
        for name in data if isinstance(data, Mapping) else ():
            text = text.replace(str(place.resolve() / f"{name}.npz"), f"the data of {name}")
        return as_arguments(text.replace(str(place), "data"))

    try:
        yield in_words
    except FeddaError as error:
        error.args = (in_words(str(error)),)
        raise


def several(given: str | Sequence[str] | None) -> list[str]:
    """A text, several texts or nothing, as a list."""
    return [given] if isinstance(given, str) else list(given or ())


def chosen_seeds(seeds: int | Sequence[int]) -> list[int]:
    """The seeds that a program names.

    Raises:
        ConfigError: there is none, or one is no whole number from 0.
    """
    found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not found or not all(isinstance(s, int) and s >= 0 for s in found):
        raise ConfigError(f"seeds is {seeds!r}; give whole numbers from 0, such as (0, 1, 2).")
    return found


def refuse_arguments(flat: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Refuse settings that have an argument of their own.

    Raises:
        ConfigError: naming the first one and the argument.
    """
    for key in filter(instead.get, flat):
        raise ConfigError(f"{key} is not taken as a setting here; give {instead[key]}.")
