"""The quick suite under other arithmetic, one variation after another. ``make rounding`` runs this.

numpy, torch and OpenBLAS choose their loops by the CPU they find, and sum in another order for each; threads and the
seed of hashes change the order too. A variation pins these by environment variables to what another machine would
choose. What is in use is read from the libraries in each run and must be what was asked for. Whole output is in
``out/rounding``; a variation that passed is not run again until a file of the repository changes.
"""

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "rounding"
NUMPY, TORCH, BLAS = "NPY_DISABLE_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
HASH = "PYTHONHASHSEED"
VARIED = (NUMPY, TORCH, BLAS, HASH, *THREADS)
BEYOND, AVX512 = "all beyond the baseline", "all with AVX-512"  # derived from what numpy finds on this machine
WIDE = re.compile("AVX512|X86_V4")  # numpy's names of features with AVX-512, before and since 2.4


class Variation(NamedTuple):
    """Variables to set, what the libraries must then say of themselves (patterns), and what the CPU needs."""

    variables: dict
    shows: dict
    needs: str = ""


def _threads(n):
    return Variation(dict.fromkeys(THREADS, str(n)), {"threads": rf"{n}( {n})*"}, "" if n == 1 else f"{n} cores")


_PRESCOTT = {"blas": ".*openblas.* (Katmai|Prescott)"}  # one kernel, called by the older name
_NARROW = {"numpy": rf"(?!.*({WIDE.pattern})).+"}

VARIATIONS = {
    "plain": Variation({}, {}),
    "numpy-baseline": Variation({NUMPY: BEYOND}, {"numpy": ""}),
    "numpy-avx2": Variation({NUMPY: AVX512}, _NARROW, "AVX-512"),
    "torch-default": Variation({TORCH: "default"}, {"torch": "DEFAULT"}),
    "torch-avx2": Variation({TORCH: "avx2"}, {"torch": "AVX2"}, "AVX2"),
    "torch-avx512": Variation({TORCH: "avx512"}, {"torch": "AVX512"}, "AVX-512"),
    "openblas-prescott": Variation({BLAS: "Prescott"}, _PRESCOTT, "x86"),
    "openblas-haswell": Variation({BLAS: "Haswell"}, {"blas": ".* Haswell"}, "AVX2"),
    "openblas-skylakex": Variation({BLAS: "SkylakeX"}, {"blas": ".* SkylakeX"}, "AVX-512"),
    "one-thread": _threads(1),
    "two-threads": _threads(2),
    "hash-0": Variation({HASH: "0"}, {"hash": "0"}),
    "hash-1": Variation({HASH: "1"}, {"hash": "1"}),
    # All libraries at once, as on a CPU of 2006 and on one of 2013: what `make test` runs a part of the suite under
    "baseline": Variation(
        {NUMPY: BEYOND, TORCH: "default", BLAS: "Prescott", **_threads(1).variables},
        {"numpy": "", "torch": "DEFAULT", **_PRESCOTT, **_threads(1).shows},
        "x86",
    ),
    "avx2": Variation(
        {NUMPY: AVX512, TORCH: "avx2", BLAS: "Haswell", HASH: "1"},
        {**_NARROW, "torch": "AVX2", "blas": ".* Haswell"},
        "AVX2",
    ),
}  # fmt: skip

# What `make test` runs under these, a minute of CPU time each: tests of numbers, without what reads files, starts
# processes, draws from distributions, or takes many CPU seconds for arithmetic that others of these try too
PART = [
    "tests/synth",
    "tests/analysis",
    *(f"--ignore=tests/{name}" for name in (
        "analysis/checking", "analysis/derivations/test_phi.py", "analysis/dynamics/test_stability.py",
        "analysis/test_advice.py", "analysis/test_auditing.py", "analysis/test_cluster.py",
        "analysis/test_intervals.py", "analysis/test_libraries.py", "analysis/test_lint.py",
        "analysis/test_processes.py", "analysis/test_ranking.py", "synth/test_devices.py",
    )),
    *(f"--deselect=tests/{name}" for name in (
        "analysis/derivations/test_derivations.py::test_every_preset_can_be_shown",
        "analysis/derivations/test_derivations.py::test_every_step_holds_on_random_models",
        "analysis/dynamics/test_training.py::test_the_mean_of_sampled_directions_is_the_expected_one",
        "analysis/test_digits.py::test_the_command_prints_the_table_and_ends_well",
        "analysis/test_montecarlo.py::test_samples_agree_with_the_exact_moments",
        "synth/test_configurations.py::test_score_coefficients_are_the_formula_for_every_option",
        "synth/test_identities.py::test_past_cross_terms_vanish",
        "synth/test_identities.py::test_ratios_off_policy",
        "synth/test_moments.py::test_every_option_agrees_with_enumeration",
        "synth/test_moments.py::test_scores_without_their_zeros_give_the_same_moments",
    )),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- what the machine has


def simd():
    """numpy's ``(baseline, found beyond it)``, as this process dispatches."""
    import numpy as np

    listed = np.show_config(mode="dicts")["SIMD Extensions"]
    return listed.get("baseline", []), listed.get("found", [])


def abilities():
    """What variations may need and this machine has."""
    every = {name for names in simd() for name in names}
    known = {
        "x86": every & {"SSE2", "X86_V2"},
        "AVX2": every & {"AVX2", "X86_V3"},
        "AVX-512": every & {"AVX512_SKX", "X86_V4"},
        "2 cores": (os.cpu_count() or 1) > 1,
    }
    return {name for name, there in known.items() if there}


def environment(variables, found):
    """The variables with numpy's list filled in: it warns of a name that is not there, or is of the baseline."""
    lists = {BEYOND: found, AVX512: [name for name in found if WIDE.match(name)]}
    filled = {name: " ".join(lists[value]) if value in lists else value for name, value in variables.items()}
    return {name: value for name, value in filled.items() if value}


def in_use():
    """What this process computes with, in the libraries' own words."""
    import torch
    from numpy._core import _multiarray_umath

    from klgrad.analysis.arithmetic import arithmetic

    library = ctypes.CDLL(_multiarray_umath.__file__)  # OpenBLAS is found through it; wheels rename its functions
    names = ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads")
    blas = [getattr(library, name)() for name in names if hasattr(library, name)][:1]
    return arithmetic(torch=True) | {
        "numpy": " ".join(simd()[1]),
        "threads": " ".join(map(str, (torch.get_num_threads(), *blas))),
        "hash": os.environ.get(HASH, "random"),
    }


def unmet(shows, used):
    """What was asked for and is not in use, in words."""
    return [
        f"{name}: {used[name] or 'nothing'}" for name, wanted in shows.items() if not re.fullmatch(wanted, used[name])
    ]


def inside(name, tests):
    """In the variation's own process: says what is in use, and becomes the test runner where that is right."""
    used = in_use()
    print(json.dumps(used), flush=True)
    if wrong := unmet(VARIATIONS[name].shows, used):
        sys.exit(f"{name} did not take effect: {'; '.join(wrong)}")
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-n", "2", *tests])


# -------------------------------------------------------------------------------------------------------- the runs


def tree():
    """A hash of every file that a result depends on."""
    digest = hashlib.sha256(json.dumps([sys.version, PART]).encode())
    parts = [p for p in sorted(ROOT.iterdir()) if p.name[0] != "." and p.name not in ("out", "build", "dist")]
    for part in parts:
        for path in sorted(part.rglob("*")) if part.is_dir() else [part]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run(name, found, tests):
    """``(passed, closing line, what was in use)``; what failed is printed."""
    log = OUT / f"{name}.log"
    variables = environment(VARIATIONS[name].variables, found)
    print(f"{name}: {' '.join(f'{k}={v!r}' for k, v in variables.items()) or 'as it comes'}", flush=True)
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, __file__, "--inside", name, *tests],
            cwd=ROOT, env=os.environ | variables, stdout=out, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    text = log.read_text()
    first, *lines = text.strip().splitlines() or [""]
    used = json.loads(first) if first.startswith("{") else {}
    closing = lines[-1].strip("= ") if lines else first
    if done.returncode:
        print(text[max(text.find("= FAILURES ="), 0) :])
    print(f"  {words(used)}\n  {closing}", flush=True)
    return done.returncode == 0, closing, used


def words(used):
    """What was in use, on a line."""
    return "; ".join(f"{name} {value or 'baseline'}" for name, value in used.items())


def kept(names, tests):
    """``(now, passed)``: this tree's hash and, of the variations, those that passed on it before."""
    now = f"{tree()} {' '.join(tests)}"
    file = OUT / "passed.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    return now, {name: before[name] for name in names if before.get(name, {}).get("tree") == now}


def keep(name, now, closing, used):
    file = OUT / "passed.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(before | {name: {"tree": now, "closing": closing, "used": used}}, indent=1))
    part.replace(file)


def table(results, absent):
    """The closing lines of all, and what this machine cannot vary."""
    width = max(map(len, (*results, *absent)), default=0)
    lines = [
        f"{name:{width}}  {'passed' if passed else 'FAILED'}  {closing}" for name, (passed, closing) in results.items()
    ]
    lines += [f"{name:{width}}  not here: it needs {needs}" for name, needs in absent.items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variations", nargs="*", metavar="VARIATION", help=f"all without; of {', '.join(VARIATIONS)}")
    parser.add_argument("--part", action="store_true", help="only the part that make test runs, and always anew")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders instead of the whole suite")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.inside:
        inside(options.inside, [*options.variations, *rest])
    unknown = [name for name in options.variations if name not in VARIATIONS]
    if unknown or rest:
        parser.error(f"there is no {' '.join([*unknown, *rest])}: the variations are {', '.join(VARIATIONS)}")
    for name in VARIED:
        os.environ.pop(name, None)  # one's own settings are no variation
    OUT.mkdir(parents=True, exist_ok=True)
    able, (_, found) = abilities(), simd()
    chosen = options.variations or list(VARIATIONS)
    absent = {name: needs for name in chosen if (needs := VARIATIONS[name].needs) and needs not in able}
    tests = PART if options.part else options.tests
    now, before = ("", {}) if options.part else kept(chosen, tests)
    results = {}
    try:
        for name in chosen:
            if name in before:
                results[name] = True, f"{before[name]['closing']} (before; nothing has changed since)"
            elif name not in absent:
                passed, closing, used = run(name, found, tests)
                results[name] = passed, closing
                if passed and not options.part:
                    keep(name, now, closing, used)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from here\n{table(results, absent)}")
        sys.exit(130)
    print(table(results, absent))
    sys.exit(not all(passed for passed, _ in results.values()))


if __name__ == "__main__":
    main()
