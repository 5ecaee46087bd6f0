"""Curves: the results' numbers, one point per round after any stops, and no harm to a run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from clients.site.memory import resident
from fedda.errors import ConfigError
from fedda.settings import RunConfig
from server import run as server_run
from server.journal import Event, Journal, Listener
from server.tracking import curves as tracked
from server.tracking import wandb_runs
from server.tracking.mlflow_runs import MLflow
from server.tracking.trackers import EVENTS, About, Point, TensorBoard
from tests.local_grid import FAST, Node, ScriptedGrid, stop_after

FINAL = {
    *("final/accuracy", "final/selected-accuracy", "final/selected-round"),
    *("final/seconds", "final/bytes", "final/refined-accuracy"),
}
Curves = dict[str, list[tuple[int, float]]]


def curves(folder: Path) -> Curves:
    """Return what TensorBoard shows: each curve's steps and values."""
    shown = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def expected(training: dict[str, Any]) -> Curves:
    """Return the same curves, made from results.json without the code under test."""
    points: Curves = {}
    for entry in training["rounds"]:
        for key, value in entry.items():
            if key == "round":
                continue
            inner = value.items() if isinstance(value, dict) else [("", value)]
            for name, number in inner:
                tag = f"{key}/{name.replace(' ', '-')}".rstrip("/")
                points.setdefault(tag, []).append((entry["round"], number))
    last = training["rounds"][-1]["round"]
    points["final/accuracy"] = [(last, training["final_accuracy"])]
    points["final/selected-accuracy"] = [(last, training["selected_accuracy"])]
    points["final/selected-round"] = [(last, training["selected_round"])]
    points["final/seconds"] = [(last, training["seconds"])]
    points["final/bytes"] = [(last, sum(training["bytes"].values()))]
    points["final/refined-accuracy"] = [(last, training["refined"]["accuracy"])]
    return points


def same(found: Curves, wanted: Curves) -> None:
    assert set(found) == set(wanted)
    # A checkpoint cannot hold its own writing time: only the journal has that of every round.
    checkpoints = [step for step, _ in found.pop("phases/checkpoint")]
    assert checkpoints == [step for step, _ in wanted["loss"]]
    wanted.pop("phases/checkpoint")
    for tag, points in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        values = [value for _, value in points]
        assert [value for _, value in found[tag]] == pytest.approx(values, rel=1e-6), tag


def run(
    domains: list[Node], settings: dict[str, Any], *listeners: Listener
) -> tuple[dict[str, Any], list[Event]]:
    """Perform a whole run with a journal on disk, as real runs do."""
    resident.cache_clear()
    events: list[Event] = []
    config = RunConfig.parse(FAST | settings)
    path = Path(config.run.dir) / config.run.name / "journal.jsonl"
    journal = Journal(path, events.append, *listeners)
    return server_run.execute(config, ScriptedGrid(domains), journal), events


def stopped(domains: list[Node], settings: dict[str, Any], server_round: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(server_round))


# ---- what is logged ----------------------------------------------------------------------------


def test_every_number_of_a_round_has_a_name() -> None:
    entry = {
        "event": "round",
        "time": 1.5,
        "method": "kd3a",
        "seed": 3,
        "round": 2,
        "loss": 0.5,
        "kept": 1,
        "sure": True,
        "note": "text",
        "weights": {"anna": 0.25},
        "bytes": {"to source model": 8},
        "phases": {"train": 2.0, "deep": {"er": 3}},
        "gate": [0.1, 0.2],
    }
    assert dict(tracked.numbers(entry)) == {
        "loss": 0.5,
        "kept": 1.0,
        "weights/anna": 0.25,
        "bytes/to-source-model": 8.0,
        "phases/train": 2.0,
        "phases/deep/er": 3.0,
        "gate/0": 0.1,
        "gate/1": 0.2,
    }


def test_tensorboard_shows_what_the_results_say(domains: list[Node], runs: dict[str, str]) -> None:
    results, events = run(domains, runs | {"run.baseline": "fedavg", "kd3a.mixup": 0.125})
    folder = Path(runs["run.dir"]) / "run"
    for method in ("fedavg", "kd3a"):
        same(curves(folder / f"{method}-0"), expected(results["trainings"][method][0]))
    shown = EventAccumulator(str(folder / "kd3a-0")).Reload()
    times = [e["time"] for e in events if e["event"] == "round" and e["method"] == "kd3a"]
    assert [point.wall_time for point in shown.Scalars("loss")] == times
    (settings,) = shown.Tensors("settings/text_summary")
    text = settings.tensor_proto.string_val[0].decode()
    assert "| kd3a.mixup | 0.125 |" in text and "| seed | 0 |" in text
    assert "fedprox" not in text and "run.dir" not in text and "wait." not in text


def test_tensorboard_has_the_settings_and_the_summary_as_hparams(
    domains: list[Node], runs: dict[str, str]
) -> None:
    run(domains, runs | {"rounds": 1, "run.seeds": "7", "kd3a.mixup": 0.125})
    shown = EventAccumulator(str(Path(runs["run.dir"]) / "run" / "kd3a-7")).Reload()
    protos: Any = plugin_data_pb2  # whose classes protobuf makes on import
    hparams = {
        tag: protos.HParamsPluginData.FromString(data)
        for tag, data in shown.PluginTagToContent("hparams").items()
    }
    start = hparams["_hparams_/session_start_info"].session_start_info.hparams
    assert start["kd3a.mixup"].number_value == 0.125
    assert start["method"].string_value == "kd3a" and start["seed"].number_value == 7
    metrics = hparams["_hparams_/experiment"].experiment.metric_infos
    assert {metric.name.tag for metric in metrics} == FINAL <= set(shown.Tags()["scalars"])
    assert hparams["_hparams_/session_end_info"].session_end_info.status == 1  # success


def test_without_trackers_nothing_is_written(domains: list[Node], runs: dict[str, str]) -> None:
    run(domains, runs | {"rounds": 1, "track.tensorboard": False})
    assert not list(Path(runs["run.dir"]).rglob(f"{EVENTS}*"))


# ---- resuming ----------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_its_curves(domains: list[Node], runs: dict[str, str]) -> None:
    """The run stops twice, each time before its trackers get the last round."""
    settings = {**runs, "rounds": 4}
    stopped(domains, settings, 1)
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    assert "loss" not in curves(folder)
    stopped(domains, settings | {"run.resume": True}, 3)
    assert [step for step, _ in curves(folder)["loss"]] == [1, 2]
    results, _ = run(domains, settings | {"run.resume": True})
    same(curves(folder), expected(results["trainings"]["kd3a"][0]))
    times = [p.wall_time for p in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    lines = (folder.parent / "journal.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert times == [event["time"] for event in rounds] and len(times) == 4


def test_a_finished_run_that_is_resumed_has_no_point_twice(
    domains: list[Node], runs: dict[str, str]
) -> None:
    results, _ = run(domains, runs)
    run(domains, runs | {"run.resume": True})
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    same(curves(folder), expected(results["trainings"]["kd3a"][0]))


def test_a_training_begun_afresh_begins_its_curves_afresh(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = {**runs, "rounds": 3}
    stopped(domains, settings, 3)
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    assert [step for step, _ in curves(folder)["loss"]] == [1, 2]
    (folder / "checkpoint.json").unlink()
    stopped(domains, settings | {"run.resume": True}, 2)
    assert [step for step, _ in curves(folder)["loss"]] == [1]


def test_trackers_may_be_turned_on_later(domains: list[Node], runs: dict[str, str]) -> None:
    stopped(domains, runs | {"track.tensorboard": False}, 1)
    results, _ = run(domains, runs | {"run.resume": True})
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    same(curves(folder), expected(results["trainings"]["kd3a"][0]))


def test_an_open_tensorboard_forgets_a_file_that_was_replaced(tmp_path: Path) -> None:
    """A TensorBoard that has read the first file must not show points twice after the second."""
    about = About("run", "kd3a", 0, tmp_path, {"seed": 0})
    points = [Point(step, 10.0 + step, {"loss": float(step)}) for step in (1, 2, 3)]
    tracker = TensorBoard()
    tracker.begin(about, points)
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert len(shown.Scalars("loss")) == 3
    tracker.begin(about, points[:2])
    assert [point.step for point in shown.Reload().Scalars("loss")] == [1, 2]
    tracker.begin(about, points)
    assert [point.step for point in shown.Reload().Scalars("loss")] == [1, 2, 3]
    tracker.stop()


def steps_in_all_files(folder: Path) -> list[int]:
    """Return the steps of one curve in every event file, as a program sees that reads them all."""
    steps = []
    for file in sorted(folder.glob(f"{EVENTS}*")):
        shown = EventAccumulator(str(file)).Reload()
        if "loss" in shown.Tags()["scalars"]:
            steps += [point.step for point in shown.Scalars("loss")]
    return steps


def test_event_files_of_a_resumed_run_do_not_overlap(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = {**runs, "rounds": 4}
    stopped(domains, settings, 3)
    stopped(domains, settings | {"run.resume": True}, 4)
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    assert steps_in_all_files(folder) == [1, 2, 3]
    run(domains, settings | {"run.resume": True})
    assert steps_in_all_files(folder) == [1, 2, 3, 4]
    assert len(list(folder.glob(f"{EVENTS}*"))) <= 2


# ---- trackers that fail ------------------------------------------------------------------------


class Fake:
    """A tracker that fails where `fails` says so, and otherwise keeps the points it is given."""

    title = "Fake"

    def __init__(self, fails: Callable[[str, int], bool]) -> None:
        self.fails = fails
        self.steps: dict[str, list[int]] = {}
        self.calls: list[str] = []
        self.name = ""

    def _do(self, what: str, step: int) -> None:
        self.calls.append(what)
        if self.fails(what, step):
            raise OSError(28, "No space\nleft on device")

    def begin(self, about: About, points: list[Point]) -> None:
        self.name = f"{about.method}-{about.seed}"
        self._do("begin", len(points))
        self.steps[self.name] = [point.step for point in points]

    def add(self, point: Point) -> None:
        self._do("add", point.step)
        self.steps[self.name].append(point.step)

    def finish(self, point: Point) -> None:
        self._do("finish", point.step)

    def stop(self) -> None:
        self._do("stop", 0)


BOTH = {"fedavg-0": [1, 2], "kd3a-0": [1, 2]}


@pytest.mark.parametrize(
    ("fails", "steps", "failures"),
    [
        (lambda what, step: True, {}, 1),
        (lambda what, step: what == "begin" and step == 0, BOTH, 1),
        (lambda what, step: what == "add", BOTH, 1),
        (lambda what, step: what == "finish", BOTH, 1),
        (lambda what, step: what == "stop", BOTH, 0),
    ],
    ids=["always", "begin", "add", "finish", "stop"],
)
def test_a_failing_tracker_is_reported_in_one_line_and_catches_up(
    domains: list[Node],
    runs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[str, int], bool],
    steps: dict[str, list[int]],
    failures: int,
) -> None:
    fake = Fake(fails)
    monkeypatch.setattr(tracked, "TensorBoard", lambda: fake)
    results, events = run(domains, runs | {"run.baseline": "fedavg"})
    assert [len(t["rounds"]) for ts in results["trainings"].values() for t in ts] == [2, 2]
    messages = [e["text"] for e in events if e["event"] == "trouble"]
    assert len(messages) == len(results["events"]) == failures
    for text in messages:
        assert text.startswith("Fake cannot be written") and "\n" not in text
        assert "No space left on device" in text and "training goes on" in text
    assert fake.steps == steps


def test_a_full_disk_is_an_error_at_once_and_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = About("run", "kd3a", 0, tmp_path, {"seed": 0})
    points = [Point(step, 10.0 + step, {"loss": float(step)}) for step in (1, 2)]
    tracker = TensorBoard()
    tracker.begin(about, points)
    tracker.stop()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: open("/dev/full", "wb"))  # noqa: SIM115
        with pytest.raises(OSError, match="No space left"):
            tracker.begin(about, points)
    assert [step for step, _ in curves(tmp_path)["loss"]] == [1, 2]


def test_ctrl_c_ends_a_run_even_inside_a_tracker(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Fake):
        def add(self, point: Point) -> None:
            raise KeyboardInterrupt

    fake = Interrupted(lambda what, step: False)
    monkeypatch.setattr(tracked, "TensorBoard", lambda: fake)
    with pytest.raises(KeyboardInterrupt):
        run(domains, runs)
    assert fake.calls == ["begin", "stop"]


# ---- MLflow ------------------------------------------------------------------------------------


def test_a_missing_mlflow_is_an_error_before_a_run_begins(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r'pip install "fedda\[mlflow\]"') as error:
        run(domains, runs | {"track.mlflow": "curves"})
    assert "\n" not in str(error.value)
    assert [path.name for path in Path(runs["run.dir"]).rglob("*")] == ["run"]


@pytest.mark.parametrize(
    "address", ["https://me:hunter2@hub.example.org", "https://hunter2@hub.example.org/x"]
)
def test_an_address_with_a_password_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        MLflow(address, "fedda", tmp_path)
    assert "hunter2" not in str(error.value)


def client(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def mlflow_runs(folder: Path) -> list[Any]:
    """The MLflow runs of a folder, oldest first."""
    server = client(folder)
    all_runs = server.search_runs([server.get_experiment_by_name("fedda").experiment_id])
    return sorted(all_runs, key=lambda each: each.info.start_time)


def mlflow_curves(folder: Path, run_id: str, names: Any) -> Curves:
    histories = {name: client(folder).get_metric_history(run_id, name) for name in names}
    return {name: sorted((m.step, m.value) for m in history) for name, history in histories.items()}


@pytest.mark.slow
def test_mlflow_goes_on_with_its_curves(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops once and is resumed with another setting of `wait`; curves go to a folder."""
    from mlflow import MlflowClient

    sent: list[tuple[str, int]] = []
    real = MlflowClient.log_batch

    def log_batch(self: Any, run_id: str, metrics: Any = (), **more: Any) -> Any:
        sent.extend((metric.key, metric.step) for metric in metrics)
        return real(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    settings = {**runs, "rounds": 3, "track.mlflow": "curves", "track.tensorboard": False}
    folder = Path(runs["run.dir"]) / "curves"
    stopped(domains, settings, 2)
    (begun,) = mlflow_runs(folder)
    assert begun.info.status == "KILLED"
    results, events = run(domains, settings | {"run.resume": True, "wait.settle": 0.01})
    run(domains, settings | {"run.resume": True})  # finished: nothing to add
    assert not [e for e in events if e["event"] == "trouble"]
    assert len(sent) == len(set(sent))  # a database would hide the same point sent twice
    (finished,) = mlflow_runs(folder)
    assert (finished.info.status, finished.info.run_name) == ("FINISHED", "run kd3a-0")
    assert finished.data.params["kd3a.mixup"] == "0.2" and finished.data.params["seed"] == "0"
    assert not {"run.dir", "wait.settle", "fedprox.mu"} & set(finished.data.params)
    same(
        mlflow_curves(folder, finished.info.run_id, finished.data.metrics),
        expected(results["trainings"]["kd3a"][0]),
    )
    # Nothing else of an MLflow folder is there.
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]


@pytest.mark.nightly("server/tracking")
def test_a_training_begun_afresh_is_another_run_of_mlflow(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = {**runs, "rounds": 3, "track.mlflow": "curves"}
    folder = Path(runs["run.dir"]) / "curves"
    stopped(domains, settings, 3)
    (Path(runs["run.dir"]) / "run" / "kd3a-0" / "checkpoint.json").unlink()
    stopped(domains, settings | {"run.resume": True}, 2)
    first, second = mlflow_runs(folder)
    for each, steps in ((first, [1, 2]), (second, [1])):
        curve = mlflow_curves(folder, each.info.run_id, ["loss"])["loss"]
        assert [step for step, _ in curve] == steps


@pytest.mark.nightly("server/tracking")
def test_an_unreachable_mlflow_server_is_reported_in_one_line(
    domains: list[Node], runs: dict[str, str]
) -> None:
    results, _ = run(domains, runs | {"track.mlflow": "http://127.0.0.1:9"})
    (trouble,) = results["events"]
    assert trouble["what"] == "tracking" and trouble["text"].startswith("MLflow cannot be written")
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    same(curves(folder), expected(results["trainings"]["kd3a"][0]))  # the other tracker works


@pytest.mark.nightly("server/tracking")
def test_characters_that_mlflow_does_not_take_are_encoded(tmp_path: Path) -> None:
    tracker = MLflow("curves", "fedda", tmp_path)
    about = About("run", "kd3a", 0, tmp_path / "kd3a-0", {f"a{i}": i for i in range(150)})
    numbers = {"weights/a+b": 0.25, "weights/a*b": 0.5, "weights/Köln (2)": 0.75}
    tracker.begin(about, [Point(step, 10.0, numbers) for step in range(1, 400)])
    tracker.stop()
    (logged,) = mlflow_runs(tmp_path / "curves")
    assert logged.data.metrics == {
        "weights/a_2b_b": 0.25,
        "weights/a_2a_b": 0.5,
        "weights/Köln _28_2_29_": 0.75,
    }
    assert len(logged.data.params) == 150


QUIET = """
import socket, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
asked = []
def refuse(*words, **more):
    asked.append(words)
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.create_connection = refuse
from server.tracking.mlflow_runs import MLflow
from server.tracking.trackers import About, Point, TensorBoard
for tracker in (MLflow("curves", "fedda", Path(sys.argv[1])), TensorBoard()):
    tracker.begin(About("run", "kd3a", 0, Path(sys.argv[1]) / "kd3a-0", {"seed": 0}), [])
    tracker.add(Point(1, 10.0, {"loss": 0.5}))
    tracker.finish(Point(1, 10.0, {"final/seconds": 0.5}))
print(asked)
"""


@pytest.mark.nightly("server/tracking")
def test_mlflow_sends_no_report_of_its_use(tmp_path: Path) -> None:
    """Not even in an environment in which MLflow cannot see that this is a test."""
    away = ("CI", "PYTEST_", "GITHUB_", "DO_NOT_TRACK", "MLFLOW_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(away)}
    root = Path(tracked.__file__).parents[2]
    words = [sys.executable, "-c", QUIET, str(tmp_path), str(root)]
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves", "kd3a-0"]


def test_settings_are_those_of_one_training(tmp_path: Path) -> None:
    flat = {"run.seeds": "3,4", "run.baseline": "fedavg", "track.mlflow": "", "rounds": 5}
    tracking = tracked.Tracking(RunConfig.parse(flat), tmp_path, Journal())
    settings = tracking._describe("fedavg", 4).settings
    assert settings["method"] == "fedavg" and settings["seed"] == 4 and settings["rounds"] == 5
    assert "fedavg.weighting" in settings
    foreign = ("kd3a.", "fedprox.", "wait.", "track.", "run.dir", "run.name", "run.seeds")
    assert not [key for key in settings if key.startswith(foreign)]


# ---- Weights & Biases, as a module with the calls that are used ----------------------------------


class FakeRun:
    """A run of the fake wandb: what was logged stays, as on its server."""

    def __init__(self, id: str, **about: Any) -> None:
        self.id, self.about = id, about
        self.points: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.ends: list[int] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert all(step > known for known, _ in self.points), "wandb ignores earlier steps"
        self.points.append((step, numbers))

    def finish(self, exit_code: int = 0) -> None:
        self.ends.append(exit_code)


class FakeWandb:
    """Keeps runs by their id; one that is resumed is the same."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.fails = False

    def init(self, id: str | None, resume: str | None, **about: Any) -> FakeRun:
        if self.fails:
            raise OSError("no way to the server")
        assert (id is None) == (resume is None)
        id = id or f"run-{len(self.runs)}"
        return self.runs.setdefault(id, FakeRun(id, **about))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    for name in wandb_runs.PRIVATE:
        monkeypatch.delenv(name, raising=False)
    made = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_wandb_has_every_round_and_the_summary(
    domains: list[Node], runs: dict[str, str], wandb: FakeWandb
) -> None:
    results, _ = run(domains, runs | {"track.wandb": "team/clinics"})
    (made,) = wandb.runs.values()
    (training,) = results["trainings"]["kd3a"]
    assert [step for step, _ in made.points] == [1, 2] and made.ends == [0]
    assert [n["accuracy"] for _, n in made.points] == [r["accuracy"] for r in training["rounds"]]
    assert made.summary["final/accuracy"] == training["final_accuracy"]
    assert (made.about["entity"], made.about["project"]) == ("team", "clinics")
    assert made.about["config"]["method"] == "kd3a"
    assert not [key for key in made.about["config"] if key.startswith(("run.dir", "track."))]
    assert os.environ["WANDB_DISABLE_CODE"] == "true" and "WANDB_MODE" not in os.environ


def test_wandb_goes_on_with_a_resumed_run_and_begins_anew_with_a_new_one(
    domains: list[Node], runs: dict[str, str], wandb: FakeWandb
) -> None:
    settings = runs | {"track.wandb": "clinics", "rounds": 3}
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(2))
    run(domains, settings | {"run.resume": True})
    (made,) = wandb.runs.values()
    assert [step for step, _ in made.points] == [1, 2, 3] and made.ends == [1, 0]
    tracker = wandb_runs.WandB("clinics", Path(runs["run.dir"]))
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    tracker.begin(About("run", "kd3a", 0, folder, {}), [])  # the training began afresh
    assert len(wandb.runs) == 2


def test_an_unreachable_wandb_is_reported_once(
    domains: list[Node], runs: dict[str, str], wandb: FakeWandb
) -> None:
    wandb.fails = True
    results, _ = run(domains, runs | {"track.wandb": "clinics"})
    (told,) = (e["text"] for e in results["events"] if e["what"] == "tracking")
    assert told.startswith("Weights & Biases cannot be written (no way to the server); training")


def test_a_missing_wandb_is_an_error_before_a_run_begins(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'pip install "fedda\[wandb\]"'):
        run(domains, runs | {"track.wandb": "clinics"})
