"""Requirements of an environment at one end of what pyproject.toml allows: ``pins.py oldest`` or ``pins.py newest``.

``oldest`` pins whatever the quick suite needs to its declared lower bound; ``newest`` leaves that to the registry,
which gives the newest that the upper bounds allow. torch alone is that of constraints.txt in both: others take
gigabytes. What nothing imports while tests run, type stubs and linters, is left out. ``make oldest`` and ``make
newest`` use this.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("cluster", "llm", "tasks", "trl", "dev", "docs")
NOT_IMPORTED = {"mypy", "pandas-stubs", "reasoning-gym", "ruff", "scipy-stubs"}  # reasoning-gym needs a C compiler
HELD = "torch"


def declared(project):
    """``{name: specifier}`` of the package and its extras; one that is there twice must say the same."""
    extras = project["optional-dependencies"]
    found = {}
    for requirement in (*project["dependencies"], *(each for name in EXTRAS for each in extras[name])):
        name, specifier = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        if found.setdefault(name, specifier) != specifier:
            raise SystemExit(f"pyproject.toml asks for {name}{found[name]} and for {name}{specifier}")
    return {name: specifier for name, specifier in found.items() if name not in NOT_IMPORTED}


def pins(which, specifiers, constraints):
    """Lines for pip."""
    held = re.search(rf"^{HELD}==.*$", constraints, re.MULTILINE)[0]
    lines = []
    for name, specifier in specifiers.items():
        lowest = re.match(r">=([\d.]+)", specifier)
        if name == HELD:
            lines.append(held)
        elif which == "newest":
            lines.append(f"{name}{specifier}")
        elif lowest is None:
            raise SystemExit(f"pyproject.toml declares no lower bound for {name}: write {name}>=VERSION")
        else:
            lines.append(f"{name}=={lowest[1]}")
    return lines


def main():
    which = sys.argv[1]
    if which not in ("oldest", "newest"):
        raise SystemExit(f"{which!r} is no end: oldest or newest")
    specifiers = declared(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    found = pins(which, specifiers, (ROOT / "constraints.txt").read_text())
    held = next(line for line in found if line.startswith(f"{HELD}=="))
    print(f"# not tried: {HELD}{specifiers[HELD]} at its {which}; it is {held} here, others take gigabytes")
    print("\n".join(found))


if __name__ == "__main__":
    main()
