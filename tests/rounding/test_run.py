"""The variations: what they set, what a machine lacks for them, and that one which does not take effect is said."""

import json
import os
import subprocess
import sys

import pytest
from rounding import run


def child(name, **variables):
    """A variation's own process on no test at all: what it printed, and its exit status (5: no test)."""
    clean = {key: value for key, value in os.environ.items() if key not in run.VARIED}
    line = [sys.executable, run.__file__, "--inside", name, "-q", "--deselect=tests", "tests/test_imports.py", "-n0"]
    return subprocess.run(line, capture_output=True, text=True, cwd=run.ROOT, env=clean | variables, check=False)


def test_lists_leave_out_what_is_not_there():
    """numpy's lists, before 2.4 and since."""
    for found, narrow in (
        (["SSE42", "AVX2", "AVX512F", "AVX512_SKX"], "AVX512F AVX512_SKX"),
        (["X86_V3", "X86_V4", "AVX512_ICL"], "X86_V4 AVX512_ICL"),
    ):
        assert run.environment({run.NUMPY: run.BEYOND, run.BLAS: "Haswell"}, found) == {
            run.NUMPY: " ".join(found), run.BLAS: "Haswell",
        }  # fmt: skip
        assert run.environment({run.NUMPY: run.AVX512}, found) == {run.NUMPY: narrow}
    assert run.environment({run.NUMPY: run.AVX512}, ["AVX2"]) == {}


@pytest.mark.parametrize(
    ("name", "used", "wrong"),
    [
        ("numpy-baseline", {"numpy": "X86_V3"}, ["numpy: X86_V3"]),
        ("numpy-baseline", {"numpy": ""}, []),
        ("numpy-avx2", {"numpy": "X86_V3 AVX512_ICL"}, ["numpy: X86_V3 AVX512_ICL"]),
        ("numpy-avx2", {"numpy": ""}, ["numpy: nothing"]),
        ("numpy-avx2", {"numpy": "SSE42 AVX2"}, []),
        ("openblas-prescott", {"blas": "scipy-openblas Haswell"}, ["blas: scipy-openblas Haswell"]),
        ("openblas-haswell", {"blas": "scipy-openblas Haswell"}, []),
        ("one-thread", {"threads": "1 2"}, ["threads: 1 2"]),
    ],
)
def test_what_did_not_take_effect_is_seen(name, used, wrong):
    assert run.unmet(run.VARIATIONS[name].shows, used) == wrong


def test_a_variation_is_checked_where_its_tests_run(torch):
    name, variables = "hash-1", {run.HASH: "1", "OMP_NUM_THREADS": "1"}
    taken = child(name, **variables)
    assert taken.returncode == 5, taken.stderr
    used = json.loads(taken.stdout.splitlines()[0])
    assert used["hash"] == "1"
    assert used["threads"].split()[0] == "1"
    assert "deselected" in taken.stdout
    left = child(name)
    assert left.returncode == 1
    assert left.stderr == "hash-1 did not take effect: hash: random\n"


def test_the_table_names_what_is_not_here():
    said = run.table({"plain": (True, "9 passed"), "hash-0": (False, "1 failed")}, {"torch-avx512": "AVX-512"})
    assert [line.split(maxsplit=1) for line in said.splitlines()] == [
        ["plain", "passed  9 passed"], ["hash-0", "FAILED  1 failed"], ["torch-avx512", "not here: it needs AVX-512"],
    ]  # fmt: skip


def test_what_passed_is_kept_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "OUT", tmp_path)
    now, before = run.kept(["plain"], ["tests"])
    assert before == {}
    run.keep("plain", now, "9 passed", {})
    assert run.kept(["plain", "hash-0"], ["tests"])[1].keys() == {"plain"}
    assert run.kept(["plain"], ["tests/synth"])[1] == {}
    monkeypatch.setattr(run, "tree", lambda: "another")
    assert run.kept(["plain"], ["tests"])[1] == {}


def test_the_part_is_there():
    """A file that was renamed would silently be run, or left out, under the wrong name."""
    for entry in run.PART:
        path, _, name = entry.split("=")[-1].partition("::")
        assert (run.ROOT / path).exists(), entry
        assert f"def {name}(" in (run.ROOT / path).read_text() if name else True, entry


def test_unknown_variations_are_refused():
    line = [sys.executable, run.__file__, "plane"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no plane: the variations are plain, numpy-baseline" in done.stderr
