"""The distribution: what the wheel holds, what CI runs, what the pins cover, and that no file names a machine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]
MACHINE = re.compile(
    r"(?<![\w.])/(?:root|home|Users|work|workspace|mnt|tmp)\b"
    r"|\bpypi\.(?:org|python\.org)|\bpythonhosted\.org|\bdownload\.pytorch\.org"
)


def files(folder=ROOT):
    """Every file of the repository: nothing ignored, no link followed, no environment entered."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or any(fnmatch(path.name, pattern) for pattern in IGNORED):
            continue
        if path.is_file():
            yield path
        elif not (path / "pyvenv.cfg").exists():
            yield from files(path)


def packages():
    """The folders that are packages, as declared."""
    return [
        name.partition(".")[2].replace(".", "/") for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name
    ]


def run(command, folder, environment=None):
    """The standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requirement_names(requirements):
    return {re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


# --------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the present sources, built without network, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in files():
        copy = folder / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    options = ["-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    run([sys.executable, "-m", "pip", "wheel", *options, folder / "source"], folder)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_holds_exactly_the_package(wheel):
    sources = [*ROOT.glob("*.py"), *(p for part in packages() for p in (ROOT / part).glob("*.py")), ROOT / "py.typed"]
    sources += (ROOT / "analysis" / "entries").glob("*.toml")
    sources += (ROOT / "analysis" / "entries" / "keys").glob("*.txt")
    sources += (ROOT / "harness" / "recipes").glob("*.toml")
    expected = {"klgrad/" + path.relative_to(ROOT).as_posix() for path in sources}
    assert {
        "klgrad/cli.py",
        "klgrad/py.typed",
        "klgrad/synth/exact.py",
        "klgrad/analysis/entries/verl.toml",
    } <= expected
    found = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in found if ".dist-info/" not in name} == expected


def test_wheel_puts_nothing_generic_at_the_top(wheel):
    version = PROJECT["project"]["version"]
    assert {path.name for path in wheel.iterdir()} == {"klgrad", f"klgrad-{version}.dist-info"}


def test_wheel_has_the_command_and_the_licence(wheel):
    (info,) = wheel.glob("*.dist-info")
    assert "klgrad = klgrad.cli:process" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_wheel_imports_on_its_own(wheel):
    code = "import klgrad.cli as cli, klgrad.synth.exact as exact; print(cli.__file__, exact.__file__, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    found = run([sys.executable, "-c", code], wheel.parent, environment)
    assert found.splitlines() == [str(wheel / "klgrad/cli.py"), str(wheel / "klgrad/synth/exact.py")]


def test_wheel_finds_its_library_entries(wheel):
    code = "from klgrad.analysis.libraries import libraries; print(len(libraries()))"
    found = run([sys.executable, "-c", code], wheel.parent, {**os.environ, "PYTHONPATH": str(wheel)})
    files = (ROOT / "analysis" / "entries").glob("*.toml")
    assert int(found) == len([path for path in files if "@" not in path.stem and path.stem != "stages"]) > 0


def test_every_folder_of_the_package_is_declared():
    found = [*ROOT.glob("*/__init__.py"), *ROOT.glob("*/*/__init__.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in found if ".venv" not in path.parts}
    assert folders == set(packages())
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {
        "klgrad": ".",
        **{f"klgrad.{f.replace('/', '.')}": f for f in folders},
    }
    assert set(PROJECT["tool"]["mypy"]["packages"]) == {f"klgrad.{f}" for f in folders if "/" not in f}


def test_the_root_is_no_package_of_its_own():
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


# --------------------------------------------------------------------------------------- pins, CI, documentation


def test_pins_are_exact_and_cover_what_is_declared():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\d.]+(\.post\d+)?", pin)] == []
    declared = [*PROJECT["project"]["dependencies"], *chain(*PROJECT["project"]["optional-dependencies"].values())]
    assert requirement_names(declared) <= requirement_names(pins)


def test_every_installation_is_pinned():
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert lines
    ends = [line for line in lines if "-r $(VENV)/$*/pins.txt" in line]  # of make oldest and make newest, on purpose
    assert all("-c constraints.txt" in line for line in lines if line not in ends)
    assert len(ends) == 1


def test_ci_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    first, *rest = (line for line in script.read_text().splitlines() if not line.startswith(("#", "cd ")))
    assert first == "set -euo pipefail"
    assert len(rest) == 1
    assert re.search(rf"^\s*(?:\$ )?{re.escape(rest[0])}\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(PROJECT['project']['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


# ------------------------------------------------------------------------------------------------ no machine, no host


def test_no_file_names_a_machine_path_or_a_registry():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files()
        for match in MACHINE.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_all_kinds_of_files_are_read():
    names = {path.relative_to(ROOT).as_posix() for path in files()}
    assert {".ci/run", "Makefile", "README.md", "synth/exact.py", "tests/test_packaging.py"} <= names


@pytest.mark.parametrize("parts", [("", "root", "x"), ("see ", "work", "main"), ('"', "tmp", "w"), ("", "home", "me")])
def test_a_machine_path_would_be_seen(parts):
    assert MACHINE.search("/".join(parts))


@pytest.mark.parametrize("host", ["pypi", "files.pythonhosted", "download.pytorch"])
def test_a_registry_would_be_seen(host):
    assert MACHINE.search(f"https://{host}.org/simple")


@pytest.mark.parametrize("text", ["framework/home", "bias/root mean square", "out/tmp", "#!/usr/bin/env bash"])
def test_ordinary_text_passes(text):
    assert not MACHINE.search(text)
