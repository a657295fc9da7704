"""Pins come from pyproject.toml and constraints.txt alone; torch is never another than the one that was tested."""

import tomllib

import pytest
from bounds import pins

PROJECT = {
    "dependencies": ["numpy>=2.0", "torch>=2.6"],
    "optional-dependencies": {name: [] for name in pins.EXTRAS}
    | {"dev": ["trl>=1.16,<1.17", "ruff>=0.12", "numpy>=2.0"]},
}
HELD = "tokenizers==1\ntorch==2.13.0\ntorchvision==3\n"


def test_each_end_is_pinned_by_what_is_declared():
    declared = pins.declared(PROJECT)
    assert pins.pins("oldest", declared, HELD) == ["numpy==2.0", "torch==2.13.0", "trl==1.16"]
    assert pins.pins("newest", declared, HELD) == ["numpy>=2.0", "torch==2.13.0", "trl>=1.16,<1.17"]


def test_what_cannot_be_pinned_is_said():
    with pytest.raises(SystemExit, match="write numpy>=VERSION"):
        pins.pins("oldest", {"numpy": ""}, HELD)
    twice = {**PROJECT, "dependencies": ["numpy>=2.1"]}
    with pytest.raises(SystemExit, match=r"numpy>=2\.1 and for numpy>=2\.0"):
        pins.declared(twice)


def test_the_repository_declares_a_bound_for_everything():
    specifiers = pins.declared(tomllib.loads((pins.ROOT / "pyproject.toml").read_text())["project"])
    found = pins.pins("oldest", specifiers, (pins.ROOT / "constraints.txt").read_text())
    assert {"numpy", "scipy", "pandas", "matplotlib", "transformers", "trl", "pytest"} < {
        line.split("==")[0] for line in found
    }
    assert not {line.split("==")[0] for line in found} & pins.NOT_IMPORTED
