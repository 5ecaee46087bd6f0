"""What the commands refuse, how they end, and which files they leave unchanged."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from clients.site import blocks
from fedda import __version__
from fedda.cli import app, demo, launch, watching
from fedda.cli import run as run_command
from fedda.cli.client import app as client_command
from fedda.cli.exits import clear_exit
from fedda.errors import FeddaError, KeyFileError, RosterError, RunError
from fedda.flower.supported import installed
from fedda.library import beginning, own_data, simulated
from fedda.ops import bundle, engines, lock
from fedda.ops.federation import PROGRAM
from fedda.ops.spawn import Process
from fedda.results import progress
from fedda.settings import RunConfig
from server.superlink import control, gateway
from tests.command_lines import below, call
from tests.local_grid import Node
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("signal_handlers")


def refused(*words: str | Path, told: str, code: int = 1) -> None:
    """Check that a command fails with one sentence that says this."""
    done = call(*words, code=code)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.output.count("error: ") == 1 and told in done.output, done.output


@pytest.mark.parametrize("program", [app, client_command])
def test_a_program_says_its_version_and_flowers(program: typer.Typer) -> None:
    """Sites need the version of their server, and ask for it before they have data or a key."""
    done = CliRunner().invoke(program, ["--version"])
    assert (done.exit_code, done.output) == (0, f"fedda {__version__}, {installed()}\n")


@pytest.mark.parametrize("program", [app, client_command])
def test_every_option_says_what_it_means(program: typer.Typer) -> None:
    """Its own text, or that below its name in the command's docstring, which its help lacks."""

    def commands(command: Any) -> list[Any]:
        return [command, *(each for one in below(command).values() for each in commands(one))]

    found = commands(get_command(program))
    told = {f"{each.name} {p.name}": p.help for each in found for p in each.params if not p.hidden}
    assert len(told) > 30 and not [name for name, text in told.items() if not text]
    assert not [each.name for each in found if "Options:" in (each.help or "")]


@pytest.mark.parametrize(
    "command", [pytest.param("teacher clip", marks=pytest.mark.contrib), "weights", "export"]
)
def test_help_shows_the_names_of_extras(command: str) -> None:
    """What stands in brackets is no markup of the terminal's."""
    help_page = CliRunner().invoke(app, [*command.split(), "--help"]).output
    assert "fedda[" in help_page


@pytest.mark.slow  # a process of its own
def test_an_error_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    """Uses the real entry point, because click's runner bypasses the code around the command."""
    words = [*PROGRAM, "data", "check", str(tmp_path / "nowhere")]
    done = Process("fedda", words, tmp_path / "log", os.environ)
    assert done.popen.wait(PATIENCE) == 1
    (line,) = done.text().splitlines()
    assert line.startswith("error: ") and "nowhere" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFBIG, "Too large"), "a file cannot be used (Too large): make room in the "),
        (OSError(errno.ENOSPC, "Full", "/x/y"), "/x/y cannot be used (Full): make room there\n"),
        (OSError(errno.ENOTDIR, "Odd", "/x/y"), "/x/y cannot be used (Odd): give the path of a "),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_a_whole_sentence(
    capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    with pytest.raises(typer.Exit), clear_exit():
        raise error
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}") and told.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named_once_and_without_a_number(tmp_path: Path) -> None:
    place = tmp_path / "file" / "run"
    place.parent.touch()
    calls: list[Callable[[], Any]] = [
        lambda: lock.alone(place).__enter__(),
        lambda: own_data._keep(place, {}, {}),
        lambda: blocks.secret(place),
    ]
    for each in calls:
        with pytest.raises(FeddaError, match=r"\(Not a directory\)[:;] ") as caught:
            each()
        assert str(caught.value).count(str(place)) == 1


def test_the_authority_of_a_server_is_checked(tmp_path: Path) -> None:
    words = ("--dir", tmp_path, "--superlink", "hub:1", "--ca", tmp_path / "none")
    told = f"certificate {tmp_path / 'none'} cannot be read"
    refused("run", "kd3a", *words, told=told, code=3)


def test_the_demo_empties_only_what_a_demo_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thesis = tmp_path / "demo" / "thesis.tex"
    demo.clear(thesis.parent)  # the folder does not exist yet
    thesis.parent.mkdir()
    thesis.touch()
    refused("demo", "--dir", tmp_path, told="holds something else")
    (tmp_path / "demo" / "digits").mkdir()
    refused("demo", "--dir", tmp_path, "--seeds", "x", told="--seeds 'x' is not valid")
    monkeypatch.setattr(lock, "LEAVE", 0.0)
    with lock.alone(thesis.parent), pytest.raises(RunError, match="still going on"):
        demo.clear(thesis.parent)
    assert thesis.is_file()
    demo.clear(thesis.parent)
    assert not thesis.parent.exists()
    thesis.parent.symlink_to(tmp_path)
    with pytest.raises(RunError, match="holds something else"):
        demo.clear(thesis.parent)


def test_a_server_that_cannot_start_keeps_the_files_of_the_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", "")
    about, home = tmp_path / "server.json", tmp_path / "flwr" / "config.toml"

    def taken(settings: Any, every: Any, ready: Any, say: Any) -> None:
        raise RunError("the port is taken")

    def served(settings: Any, every: Any, ready: Any, say: Any) -> None:
        ready()
        assert json.loads(about.read_text())["admin"] == "127.0.0.1:8000"
        assert "127.0.0.1:8000" in home.read_text()

    monkeypatch.setattr(gateway, "run", served)
    done = call("superlink", "--insecure", "--dir", tmp_path, "--exchange-port", "8444")
    assert "note: the exchange has no port of its own" in done.stderr
    assert not about.exists()

    home.write_text("as it was")
    monkeypatch.setattr(gateway, "run", taken)
    refused("superlink", "--insecure", "--dir", tmp_path, told="the port is taken")
    assert home.read_text() == "as it was"


class FakeControl:
    """A server whose run continues until it is stopped, and a signal that comes at some call."""

    stopped: list[int]

    def __init__(self, number: int, *at: str) -> None:
        self.stopped = []
        self.number = number
        self.at = at

    def signal_at(self, call: str) -> None:
        if call in self.at:
            os.kill(os.getpid(), self.number)

    def __call__(self, address: str, ca: Path | None) -> "FakeControl":
        return self

    def sites(self) -> list[Any]:
        return []

    def start_run(self, app: Path, run_config: Any) -> int:
        self.signal_at("start")  # the server has it, and its answer is on the way
        return 7

    def run_state(self, run_id: int) -> Any:
        self.signal_at("state")
        return SimpleNamespace(ending="")

    def stop_run(self, run_id: int) -> None:
        self.signal_at("stop")
        self.stopped.append(run_id)

    def __enter__(self) -> "FakeControl":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("number", "of_ctrl_c"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGHUP, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # in the background of a script
    ],
)
@pytest.mark.parametrize("at", [("state",), ("start",), ("state", "stop")])
def test_a_command_that_gets_a_signal_stops_its_run_on_the_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    of_ctrl_c: Any,
    at: tuple[str, ...],
) -> None:
    fake = FakeControl(number, *at)
    monkeypatch.setattr(control, "Control", fake)
    monkeypatch.setattr(bundle, "stage", lambda folder, *_: folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests themselves run under nohup
    signal.signal(signal.SIGINT, of_ctrl_c)
    call("run", "kd3a", "--dir", tmp_path, "--superlink", "hub:1", code=launch.INTERRUPTED)
    assert fake.stopped == [7]


@pytest.mark.parametrize("failures", [watching.TRIES - 1, watching.TRIES])
def test_watching_survives_a_server_that_is_silent_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.0)
    journal = tmp_path / "journal.jsonl"
    answers = 2 * [True, *failures * [False]]  # one silence, and later another

    def ended() -> str:
        if not answers:
            journal.write_text('{"event": "done"}\n')
        elif not answers.pop(0):
            raise RunError("no server answers")
        return ""

    seen: list[Any] = []
    if failures < watching.TRIES:
        watching.watch(journal, 0, ended, seen.append)
        assert seen == [{"event": "done"}]
    else:
        with pytest.raises(RunError, match="no server answers"):
            watching.watch(journal, 0, ended, seen.append)


def test_a_run_whose_folder_was_moved_is_not_told_as_failed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not say so: its folder was moved"):
        watching.watch(tmp_path / "journal.jsonl", 0, lambda: "completed", print)
    ended = lock.Holder(2**22 + 1, "", lock.Holder.me().host)  # its program may be gone by then
    with pytest.raises(RunError, match="does not say so: its folder was moved"):
        watching.watch(tmp_path / "journal.jsonl", 0, lambda: "completed", print, ended)


def test_ctrl_c_before_anything_began_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "_refuse_ignored", Mock(side_effect=KeyboardInterrupt))
    done = call("run", "kd3a", "--dir", tmp_path, code=launch.INTERRUPTED)
    assert "before anything began" in done.stderr
    for name in ("launch.json", "journal.jsonl"):
        (tmp_path / name).touch()
    done = call("run", "--resume", tmp_path, code=launch.INTERRUPTED)
    assert f"go on with: fedda run --resume {tmp_path}" in done.stderr


def test_ctrl_c_while_modules_are_imported_says_so() -> None:
    """As an exception it came out as a module's own error, with a traceback and exit code 1."""
    code = (
        "import os, signal; from fedda import entry; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # also in the background
        "entry.import_module = lambda _: os.kill(os.getpid(), signal.SIGINT); entry.client()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nstopped before anything began\n")


def test_ctrl_c_while_results_are_shown_says_that_the_run_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "present", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(typer.Exit), launch.concluding(tmp_path):
        pass
    assert f"the run has finished; its results are in {tmp_path}" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    words = ("--simulate", tmp_path, "--target", "a", "--engine", "ray")
    refused("run", "kd3a", *words, told='pip install "fedda[simulation]"')


def test_runs_are_not_written_among_the_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("run", "kd3a", "--simulate", ".", "--target", "a")
    refused(*words, told="--dir runs lies in --simulate .")
    refused(*words, "--dir", tmp_path, told="lies in --simulate .")
    assert not list(tmp_path.iterdir())


def test_a_start_that_fails_leaves_no_folder(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(str(domains[0]["data"])).parent
    there = ("--dir", tmp_path / "a" / "runs")
    refused("run", "kd3a", "--simulate", root, "--target", "x", *there, told="no domain 'x'")
    refused("run", "kd3a", *there, "--server", tmp_path / "hub", told="No server runs")
    assert not list(tmp_path.iterdir())
    kept = tmp_path / "a" / "runs" / "other"
    kept.mkdir(parents=True)
    refused("run", "kd3a", *there, "--server", tmp_path / "hub", told="No server runs")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", kept.parent, kept]

    def fail(config: RunConfig, how: Any) -> None:
        (Path(config.run.dir) / config.run.name / "journal.jsonl").touch()
        raise RosterError("no target joined")

    monkeypatch.setattr(run_command, "perform", fail)
    refused("run", "kd3a", *there, told="no target joined")
    assert (kept.parent / "kd3a" / "launch.json").is_file()  # it has begun: its journal says why
    here = ("--simulate", root, "--target", "x", "--dir", tmp_path / "b")
    refused("run", "kd3a", *here, told="no target joined")
    assert not (tmp_path / "b").exists()  # it never trained


@pytest.mark.parametrize(("text", "seeds"), [("3", "0,1,2"), ("5,6", "5,6"), ("7,", "7")])
def test_seeds_mean_the_same_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, seeds: str
) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(run_command, "perform", lambda config, how: seen.append(config))
    call("run", "kd3a", "--out", tmp_path, "--seeds", text)
    assert seen[0].run.seeds == seeds
    refused("run", "kd3a", "--dir", tmp_path, "--seeds", "0", told="--seeds '0' is not valid")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("kd3a --resume R", "METHOD has no effect with --resume"),
        *(
            (f"--resume R --{option} 3", f"--{option} has no effect with --resume")
            for option in ("rounds", "seeds", "preset", "dir", "target", "start-from")
        ),
        ("kd3a --engine process", "give --simulate ROOT"),
        ("kd3a --poison a=3", "give --simulate ROOT"),
        ("kd3a --threads 1", "give --simulate ROOT"),
        ("kd3a --simulate R --server hub", "leave it out, or leave out --simulate"),
        ("kd3a -c method=fedavg", "use the argument METHOD"),
        ("kd3a -c run.resume=true", "use --resume RUN"),
        ("kd3a -c run.dir=x", "use --dir"),
        ("kd3a -c run.name=x", "use --name"),
    ],
)
def test_options_without_an_effect_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "perform", lambda config, how: None)
    (tmp_path / "R").mkdir()
    begun = {"settings": RunConfig().flat() | {"method": "kd3a"}}
    (tmp_path / "R" / beginning.LAUNCH).write_text(json.dumps(begun))
    refused("run", *words.split(), told=told)
    call("run", "--resume", "R", "-c", "wait.sites=3")


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ("{", "no run that could be resumed"),
        ('{"threads": 2}', "'settings'"),
        ('{"settings": {}, "threads": "many"}', "launch.json.threads is 'many'"),
        ('{"settings": {}, "thread": 2}', "'launch.json.thread'"),
    ],
)
def test_a_note_of_how_a_run_began_is_checked(tmp_path: Path, note: str, told: str) -> None:
    (tmp_path / "R").mkdir()
    (tmp_path / "R" / beginning.LAUNCH).write_text(note)
    refused("run", "--resume", tmp_path / "R", told=told)


@pytest.mark.parametrize("error", [RosterError("no target joined"), KeyFileError("expired")])
def test_the_resume_command_is_shown_once_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: FeddaError
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(simulated, "execute", fail)
    config = RunConfig.parse({"run.dir": str(tmp_path), "run.name": "r"})
    (tmp_path / "r" / "kd3a-0").mkdir(parents=True)
    (tmp_path / "r" / "config.json").touch()
    with pytest.raises(type(error)) as first:
        launch.perform(config, beginning.Launch(simulate="x"))
    assert str(first.value) == str(error)
    (tmp_path / "r" / "kd3a-0" / "checkpoint.json").touch()
    (tmp_path / "r" / beginning.LAUNCH).touch()
    with pytest.raises(type(error)) as second:
        launch.perform(config, beginning.Launch(simulate="x"))
    assert str(second.value) == f"{error}\ngo on with: fedda run --resume {tmp_path / 'r'}"


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """A second one took the first one's address from the folder when it ended."""
    with lock.only_server(tmp_path):
        refused("superlink", "--insecure", "--dir", tmp_path, told="Another server runs from")


def test_a_simulation_without_a_target_says_which_there_are(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / "sites" / name).mkdir(parents=True)
    words = ("run", "fedavg", "--dir", tmp_path / "runs", "--simulate", tmp_path / "sites")
    refused(*words, told="has north, south; choose one as --target")
    refused(*words, "--target", "x", told="has no domain 'x', it has north, south; choose")


def test_a_program_works_where_its_output_is_closed(tmp_path: Path) -> None:
    """As by `>&-`: no file that it opens takes the place of a stream."""
    code = (
        "import os, sys; from fedda.cli import exits\n"
        "with exits.as_a_program():\n"
        "    print('said', file=sys.stderr); sys.stdout.flush()\n"
        f"    assert os.open({str(tmp_path / 'file')!r}, os.O_CREAT) > 2"
    )
    for number in (1, 2):
        close = partial(os.close, number)
        assert subprocess.run([sys.executable, "-c", code], preexec_fn=close).returncode == 0


def test_a_full_stream_ends_a_program_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, as the last flush comes at its end."""
    code = "import sys; sys.argv = ['fedda', 'methods']; from fedda.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, check=False)
    assert done.returncode == 1
    said = capfd.readouterr().err
    assert said == "error: the output cannot be written (No space left on device); make room\n"


def test_a_name_is_begun_by_one_command_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server's program has locked the folder, too: both would show the same run."""
    monkeypatch.setattr(lock, "LEAVE", 0.0)
    place = {"run.dir": str(tmp_path), "run.name": "r"}
    first, other = (RunConfig.parse({"method": m} | place) for m in ("fedavg", "fedprox"))
    how = beginning.Launch()
    with beginning.beginning(first, how) as folder:
        with (
            pytest.raises(lock.GoingOnError, match="another --name"),
            beginning.beginning(other, how),
        ):
            pass
        refused("run", "--resume", folder, told="still going on")
        assert json.loads((folder / "launch.json").read_text())["settings"]["method"] == "fedavg"
        new = tmp_path / "new"
        with pytest.raises(lock.GoingOnError), beginning.unless(lambda: False, new):
            new.mkdir()  # by the other command, at the same time
            raise lock.still_going_on(new)
        assert new.is_dir()
    with beginning.beginning(other, how):
        pass


def test_an_option_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Click takes the last one, so the first target would have joined as a source."""
    words = ("run", "fedavg", "--simulate", tmp_path, "--target", "a")
    assert "--target is given 2 times" in call(*words, "--target", "b", code=2).output
    twice = ("--columns", "label=a", "--columns", "path=b")
    assert "--columns is given 2 times" in call("data", "check", tmp_path, *twice, code=2).output
    again = call(*words, "--dir", "x", "--dir", "y", code=1)
    assert "is given" not in again.output  # a script's last word


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["data", "check", ""], "DIR"),
        (["run", "fedavg", "--simulate", ".", "-c", ""], "-c"),
        (["superlink", "--dir", ""], "--dir"),
        (["client", "--role", "source", "--data", ""], "--data"),
    ],
)
def test_an_empty_value_is_not_the_current_folder(given: list[str], named: str) -> None:
    assert f"{named} is empty" in call(*given, code=2).output


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (("run", "kd3a"), "--data"),
        (("look",), "--data"),
        (("client",), "--data"),
        (("export", "run"), "--out"),
        (("attach", "run"), "--dir"),
    ],
)
def test_a_path_without_its_option_is_told_it(
    given: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    done = call(*given, tmp_path, code=2, columns=1000)
    assert f"{tmp_path} stands alone: give it with {option} {tmp_path}." in done.output
