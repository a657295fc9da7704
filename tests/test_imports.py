"""Dependencies point one way, and the light entry points stay light.

``cli -> commands -> figures, harness -> analysis -> synth``: read from the source with ``ast``, imports inside
functions and under TYPE_CHECKING included. What a start really loads is asked of a fresh interpreter.
"""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "files": {"files"},
    "zeros": {"zeros"},
    "synth": {"files", "synth"},
    "analysis": {"files", "zeros", "analysis", "synth"},
    "harness": {"files", "harness", "analysis", "synth"},
    "figures": {"files", "zeros", "figures"},
    "commands": {"files", "zeros", "commands", "figures", "harness", "analysis", "synth"},
    "cli": {"cli", "commands"},
}
HEAVY = {"torch", "transformers", "matplotlib", "pandas", "dask", "sympy", "latex2mathml"}
SOURCES = [*sorted(ROOT.glob("*.py")), *(path for part in MAY_IMPORT for path in sorted((ROOT / part).rglob("*.py")))]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("klgrad", *(p for p in parts if p != "__init__")))


MODULES = {module_name(path): path for path in SOURCES}


def targets(name, path, source):
    """Every module name an import statement could mean: ``from a import b`` is both a and a.b."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            yield stem
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def parts_used(name, path, source):
    """The parts of klgrad a module imports; a part imported by its bare folder name shows as ``bare NAME``."""
    split = [target.split(".") for target in targets(name, path, source)]
    own = {names[1] for names in split if names[0] == "klgrad" and len(names) > 1}
    return own | {f"bare {names[0]}" for names in split if names[0] in MAY_IMPORT}


def loaded_after(code, folder):
    """Which heavy packages a fresh interpreter holds after the code, started away from the repository."""
    report = f"import json, sys; print(json.dumps(sorted({HEAVY} & set(sys.modules))))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# -------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_towards_synth(name):
    path = MODULES[name]
    assert parts_used(name, path, path.read_text()) <= MAY_IMPORT[name.split(".")[1]]


@pytest.mark.parametrize(
    ("name", "statement", "part"),
    [
        ("klgrad.synth.exact", "def f():\n    from klgrad import analysis", "analysis"),
        ("klgrad.synth.exact", "if TYPE_CHECKING:\n    from ..cli import main", "cli"),
        ("klgrad.figures", "from ..synth.exact import kl", "synth"),
        ("klgrad.analysis.results", "import klgrad.figures as pictures", "figures"),
        ("klgrad.analysis.results", "from synth import exact", "bare synth"),
    ],
)
def test_a_wrong_import_would_be_seen(name, statement, part):
    path = Path("__init__.py" if name.count(".") == 1 else "module.py")
    assert parts_used(name, path, statement) == {part}
    assert part not in MAY_IMPORT[name.split(".")[1]]


def test_every_part_was_read():
    assert {name.split(".")[1] for name in MODULES} >= {"synth", "analysis", "figures", "commands", "cli"}


def imported_modules(name, path):
    """Modules of klgrad that a module imports; not its own package, which is loaded before it anyway."""
    return set(targets(name, path, path.read_text())) & set(MODULES) - {name, name.rpartition(".")[0]}


def test_imports_are_acyclic():
    TopologicalSorter({name: imported_modules(name, path) for name, path in MODULES.items()}).prepare()


# ------------------------------------------------------------------------------------------- what a start loads


def test_synth_loads_nothing_heavy(tmp_path):
    modules = [name for name in MODULES if name.startswith("klgrad.synth")]
    assert "klgrad.synth.moments" in modules
    assert loaded_after(f"import {', '.join(modules)}", tmp_path) == []


def test_help_loads_nothing_heavy(tmp_path):
    code = """
from klgrad.cli import COMMANDS, main
for words in ([], *([command] for command in COMMANDS)):
    main([*words, "--help"], "klgrad", standalone_mode=False)
"""
    assert loaded_after(code, tmp_path) == []


def test_something_heavy_would_be_seen(tmp_path):
    assert loaded_after("import matplotlib", tmp_path) == ["matplotlib"]


def test_cli_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "klgrad.cli", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "figure1" in done.stdout
