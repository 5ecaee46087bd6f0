"""What is shipped: a wheel with one top-level name, and a Flower app, the same from any place."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedda
from fedda.errors import RunError
from fedda.ops import bundle
from fedda.ops.federation import OFFLINE
from tests.command_lines import call
from tests.local_grid import make_domains
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE = ("fedda", *bundle.FOLDERS)
SECONDS = PATIENCE
BUILD, EPOCH = (sys.executable, "-m", "build", "--wheel"), "1750000000"


def sh(*words: str | Path, cwd: Path, **env: str) -> str:
    """Run a program -> its output; if it fails, the test's error shows all it wrote."""
    done = ran(*words, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, however it ends."""
    command, whole = [str(word) for word in words], clean_env() | env
    return subprocess.run(
        command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def clean_env() -> dict[str, str]:
    """Return the environment without variables that lead to the checkout or to the outer make."""
    away = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    scripts = sysconfig.get_path("scripts")
    env = {key: value for key, value in os.environ.items() if key not in away}
    return env | OFFLINE | {"PATH": f"{scripts}:{env['PATH']}", "COLUMNS": "200"}


def tree(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder, by its relative name, without Python's caches."""
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def in_wheel(module: str) -> str:
    return f"fedda/{module}" if module.split("/")[0] in bundle.FOLDERS else module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all files that git tracks or would add."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = sh("git", "ls-files", "-z", "-c", "-o", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def modules(checkout: Path) -> set[str]:
    """Every module of the project itself."""
    return {name for name in tree(checkout) if name.endswith(".py") and name.split("/")[0] in CODE}


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    sh(*BUILD, "--outdir", out, checkout, cwd=out, SOURCE_DATE_EPOCH=EPOCH)
    (built,) = out.iterdir()
    shutil.rmtree(checkout / "build", ignore_errors=True)  # else `flwr build` packs it
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment of its own -> its bin folder.

    A path file adds this environment's dependencies. Python reads no path files in a folder that is
    added like this, so this environment's editable fedda is not found.
    """
    bin_ = environment(tmp_path_factory.mktemp("venv"))
    pip(bin_ / "python", str(wheel))
    (packages,) = bin_.parent.glob("lib/python*/site-packages")
    location = sh(bin_ / "python", "-c", "import fedda; print(fedda.__file__)", cwd=bin_)
    assert Path(location.strip()) == packages / "fedda" / "__init__.py"
    return bin_


def environment(folder: Path) -> Path:
    """Make an environment with this one's packages, but without its fedda -> its bin folder."""
    sh(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(here)) + "\n")
    return folder / "bin"


def pip(python: Path, *words: str) -> None:
    """Install into an environment without downloading anything."""
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", *offline, *words]
    sh(*command, cwd=python.parent)


@pytest.mark.nightly("pyproject.toml", "MANIFEST.in")
def test_the_source_archive_has_every_file(checkout: Path, tmp_path: Path) -> None:
    """Whoever gets it can read the documentation, run the examples and the tests."""
    copy = shutil.copytree(checkout, tmp_path / "copy")
    build = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    sh(*build, copy, cwd=tmp_path)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tree(checkout) if not name.startswith(".")}
    assert wanted - inside == set()


def test_one_version_everywhere() -> None:
    assert TABLES["project"]["version"] == fedda.__version__
    assert f"\n## [{fedda.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.contrib
def test_the_staged_app_holds_the_checkouts_files(tmp_path: Path) -> None:
    folder = bundle.stage(tmp_path / "app")
    staged = tomllib.loads((folder / "pyproject.toml").read_text())
    assert staged["tool"]["flwr"] == TABLES["tool"]["flwr"]
    for key in ("name", "version", "license"):
        assert staged["project"][key] == TABLES["project"][key]
    files = tree(folder)
    assert {name.split("/")[0] for name in files} == {"pyproject.toml", *CODE}
    assert files["server/app.py"] == (ROOT / "server" / "app.py").read_bytes()
    assert files["fedda/cli/run.py"] == (ROOT / "fedda" / "cli" / "run.py").read_bytes()


def test_stage_refuses_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(RunError, match="holds files already"):
        bundle.stage(tmp_path)
    assert tree(tmp_path) == {"notes.md": b"mine"}


def test_help_keeps_the_texts_of_arguments() -> None:
    # click 8.5 under typer 0.20 drops them; the bound in pyproject.toml is there for this.
    assert "The site." in call("keys", "add", "--help").output


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shown = sh("make", cwd=tmp_path)
    listed = set(re.findall(r"^make ([\w-]+)", shown, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([\w-]+):.* ## ", makefile, re.MULTILINE))
    assert listed == explained >= {"help", "demo", "test", "lint"}
    done = ran("make", "demo", "PYTHON=/no/python", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout.startswith("fedda needs Python 3.11 or newer"), done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.nightly("pyproject.toml", "fedda/ops/bundle.py")
def test_the_wheel_is_the_same_from_any_place(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "a place of its own"
    shutil.copytree(checkout, elsewhere)
    sh(*BUILD, "--outdir", tmp_path, elsewhere, cwd=tmp_path, SOURCE_DATE_EPOCH=EPOCH)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_wheel_holds_every_module_under_one_name(wheel: Path, modules: set[str]) -> None:
    info = f"fedda-{fedda.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        scripts = file.read(f"{info}/entry_points.txt").decode()
        licence = file.read(f"{info}/licenses/LICENSE")
    other = (".pyi", "py.typed", ".in")  # the last are what `fedda new` fills in
    held = {name for name in names if not name.startswith(info) and not name.endswith(other)}
    assert held == {in_wheel(m) for m in modules}
    assert {"fedda/server/app.py", "fedda/clients/app.py", "fedda/strategies/kd3a.py"} <= names
    assert {"fedda/py.typed", "fedda/__init__.pyi"} <= names
    assert "fedda/contrib/lab/templates/study/study.py.in" in names
    assert "fedda = fedda.entry:main" in scripts
    assert "fedda-client = fedda.entry:client" in scripts
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.nightly("pyproject.toml", "fedda/cli")
def test_installed_commands_say_what_they_do(installed: Path, tmp_path: Path) -> None:
    strict = {"PYTHONWARNINGS": "error::DeprecationWarning"}
    shown = sh(installed / "fedda", "--help", cwd=tmp_path, **strict)
    assert all(word in shown for word in ("demo", "run", "superlink", "keys", "compare"))
    shown = sh(installed / "fedda-client", "--help", cwd=tmp_path, **strict)
    assert all(word in shown for word in ("--role", "--superlink", "--key"))


@pytest.mark.slow
def test_installed_wheel_runs_a_method(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    make_domains(tmp_path / "data")
    simulated = ["--simulate", "data", "--target", "town", "--rounds", "1", "--baseline", "none"]
    small = ["-c", "model.name=mlp", "-c", "model.hidden=8", "-c", "train.batch-size=16"]
    sh(installed / "fedda", "run", "fedavg", *simulated, *small, cwd=tmp_path, OMP_NUM_THREADS="1")
    results = json.loads((tmp_path / "runs" / "fedavg" / "results.json").read_text())
    assert results
    folder = tmp_path / "runs" / "fedavg"
    assert (folder / "model.safetensors").is_file() and (folder / "report.html").is_file()
    whole = "from fedda import plugins; [plugins.check(m) or print(m) for m in plugins.methods()]"
    assert {"fact", "kd3a"} <= {*sh(installed / "python", "-c", whole, cwd=tmp_path).split()}


@pytest.mark.nightly("pyproject.toml", "fedda/ops/bundle.py")
def test_the_app_staged_from_the_wheel_is_the_same(
    installed: Path, modules: set[str], checkout: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from fedda.ops import bundle; "
        "bundle.stage(Path(sys.argv[1]))"
    )
    sh(installed / "python", "-c", code, tmp_path / "app", cwd=tmp_path)
    staged = tree(tmp_path / "app")
    assert set(staged) == {"pyproject.toml", *modules}
    original = tree(checkout)
    assert [name for name in modules if staged[name] != original[name]] == []
    assert staged == tree(bundle.stage(tmp_path / "again"))


@pytest.mark.nightly("pyproject.toml", "fedda/ops/bundle.py")
def test_flower_builds_the_app_and_the_checkout(
    checkout: Path, modules: set[str], tmp_path: Path
) -> None:
    for folder in (bundle.stage(tmp_path / "app"), checkout):
        sh("flwr", "build", cwd=folder, FLWR_HOME=str(tmp_path / "flwr"))
        (packed,) = folder.glob("*.fab")
        with zipfile.ZipFile(packed) as file:
            names = set(file.namelist())
            config = tomllib.loads(file.read("pyproject.toml").decode())
        packed.unlink()
        assert names == {"pyproject.toml", ".info/CONTENT", *modules}
        assert config["tool"]["flwr"]["app"] == TABLES["tool"]["flwr"]["app"]


def test_a_clone_hides_no_package_in_the_folder_that_holds_it(tmp_path: Path) -> None:
    """An editable install is a path, which a folder of the same name does not win against."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert about["tool"]["distutils"]["editable_wheel"]["mode"] == "compat"
    (tmp_path / "fedda").symlink_to(ROOT)
    code = f"import sys; sys.path.append({str(ROOT)!r}); import fedda; print(fedda.load.__name__)"
    assert sh(sys.executable, "-c", code, cwd=tmp_path) == "load\n"
