"""Run the benchmarks: whole processes that take turns, on one CPU and one thread, after a warm-up of each.

    python benchmarks/run.py [--only NAME] [--rounds 5] [--quick] [--json FILE]

Every round runs each side once, in order, so that whatever else the machine does meets all sides alike; what is
compared is the ratio within a round. Three measures: wall and CPU time of the process, start-up included, and the
seconds of work that a side reports of itself, start-up left out. Nothing here passes or fails on a time; what
needs a package that is not installed is skipped, and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MEASURES = ("wall", "cpu", "work")
PACKAGES = ("klgrad", "numpy", "scipy", "torch", "torch-struct", "trl")

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One comparison.

    Args:
        title: what is measured, for the heading.
        sides: label -> arguments of the interpreter. The first is klgrad's; ratios are the others over it.
        quick: arguments that make each side small, for a trial run.
            A side that is alone takes turns inside and prints what it found.
        rounds_inside: it is told the rounds as ``--rounds``.
        needs: packages without which it is skipped.
        folder: a folder without which it is skipped, and how to make it.
    """

    title: str
    sides: dict[str, tuple[str, ...]]
    quick: tuple[str, ...] = ()
    rounds_inside: bool = False
    needs: tuple[str, ...] = ()
    folder: str | None = None


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """The interpreter's arguments for a script beside this one."""
    return (str(HERE / name), *arguments)


def checked(name: str, *options: str) -> tuple[str, ...]:
    """The interpreter's arguments for a check of a function in ``checked.py``."""
    return ("-m", "klgrad.cli", "check", f"{HERE / 'checked.py'}:{name}", "-q", *options)


_FEW = ("--trials", "8", "--lengths", "5,20")

BENCHMARKS: dict[str, Benchmark] = {
    "montecarlo": Benchmark(
        "Figure 1's Monte Carlo: 200 trials x 1,000 sequences, six lengths to 200, six configurations",
        {
            "klgrad": script("klgrad_montecarlo.py"),
            "torch": script("baseline_torch.py"),
            "torch tuned": script("baseline_torch.py", "--tuned"),
            "uniforms": script("baseline_uniform.py"),
        },
        _FEW,
    ),
    "rtg": Benchmark(
        "the same with reward-to-go",
        {
            "klgrad": script("klgrad_montecarlo.py", "--credit", "rtg"),
            "torch": script("baseline_torch.py", "--credit", "rtg"),
            "torch tuned": script("baseline_torch.py", "--credit", "rtg", "--tuned"),
            "uniforms": script("baseline_uniform.py"),
        },
        _FEW,
    ),
    "words": Benchmark(
        "sequences over 16 words against bare uniforms",
        {"klgrad": script("sampling_rate.py")},
        ("--sequences", "1000"),
        rounds_inside=True,
    ),
    "device": Benchmark(
        "the torch engine without a GPU against the numpy engine, by kind of request",
        {"klgrad": script("device_rate.py")},
        ("--trials", "4"),
        rounds_inside=True,
    ),
    "exact": Benchmark(
        "exact means and variances of six configurations",
        {"klgrad": script("exact_moments.py")},
        ("--doublings", "2"),
        rounds_inside=True,
    ),
    "semiring": Benchmark(
        "exact KL and its gradient: V = 2, 8, 32 at T = 50, 200",
        {"klgrad": script("klgrad_kl.py"), "torch-struct": script("baseline_semiring.py")},
        ("--vocabularies", "2,4", "--lengths", "10"),
        needs=("torch_struct",),
    ),
    "enumeration": Benchmark(
        "exact means and variances of six configurations at T = 14, against all 16,384 sequences",
        {"klgrad": script("klgrad_exact.py"), "enumeration": script("baseline_enumeration.py")},
        ("--length", "6"),
    ),
    "growth": Benchmark(
        "log-log slopes of time in T, V, N and d",
        {"klgrad": script("growth.py")},
        ("--sizes", "2"),
        rounds_inside=True,
    ),
    "dynamics": Benchmark(
        "training: 20 configurations x 5 seeds x 50 steps of 256 sequences of 20 tokens, exact measures at every step",
        {"klgrad": script("klgrad_dynamics.py"), "torch": script("baseline_dynamics.py")},
        ("--steps", "2"),
    ),
    "step": Benchmark(
        "a training step of a tiny language model against TRL's RLOOTrainer",
        {"klgrad": script("llm_step.py", "out/tiny")},
        needs=("trl", "datasets"),
        folder="out/tiny",
    ),
    "startup": Benchmark(
        "the command line's help against importing torch",
        {"klgrad": ("-m", "klgrad.cli", "--help"), "torch": ("-c", "import torch")},
    ),
    "check": Benchmark(
        "a check of one function, by kind, against importing torch",
        {
            "token": checked("token", "--placement", "reward"),
            "loss": checked("loss", "--target", "token"),
            "distilled": checked("distilled", "--target", "token-forward"),
            "coupled": checked("coupled", "--target", "token"),
            "torch": ("-c", "import torch"),
        },
    ),
}


def missing(benchmark: Benchmark) -> str | None:
    """Why it cannot be run here, in one sentence; None where it can."""
    for package in benchmark.needs:
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            return f"skipped: it needs {name}, which is not installed (pip install {name})"
    if benchmark.folder and not Path(benchmark.folder).is_dir():
        return f"skipped: it needs {benchmark.folder} (klgrad llm pretrain --out {benchmark.folder})"
    return None


def pin() -> int | None:
    """Keep this process and its children on one CPU; its number, or None where that cannot be done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    return cpu


def machine() -> Row:
    """What the times depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = found[0].split(":", 1)[1].strip() if found else cpu
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed as a distribution"
    return {"cpu": cpu, "system": f"{platform.system()} {platform.machine()}", "versions": versions}


def run_once(arguments: Sequence[str]) -> tuple[Row, Row]:
    """One process: its times, and the JSON of its last line of output if it is one.

    Raises:
        RuntimeError: when the process fails, with the end of what it said.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages come compiled; the warm-up compiles ours
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {' '.join(arguments)}\n{done.stderr[-2000:]}")
    times = {"wall": wall, "cpu": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}
    said: Row = {}
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        said = json.loads(lines[-1])
    if "seconds" in said:
        times["work"] = said["seconds"]
    return times, said


def take_turns(sides: dict[str, tuple[str, ...]], rounds: int) -> dict[str, list[Row]]:
    """Times of each side in each round; all sides run once before the first."""
    for arguments in sides.values():
        run_once(arguments)
    times: dict[str, list[Row]] = {label: [] for label in sides}
    for _ in range(rounds):
        for label, arguments in sides.items():
            times[label].append(run_once(arguments)[0])
    return times


def compare(times: dict[str, list[Row]]) -> tuple[list[Row], list[Row]]:
    """Median times of each side, and the ratios within rounds of every other side to the first."""
    medians, ratios = [], []
    first, *others = times
    for label, rounds in times.items():
        shared = [m for m in MEASURES if all(m in r for r in rounds)]
        medians.append({"side": label, **{m: statistics.median(r[m] for r in rounds) for m in shared}})
    for label in others:
        for measure in MEASURES:
            pairs = zip(times[label], times[first], strict=True)
            found = [a[measure] / b[measure] for a, b in pairs if measure in a and measure in b]
            if found:
                spread = {"median": statistics.median(found), "min": min(found), "max": max(found)}
                ratios.append({"ratio": f"{label} / {first}", "measure": measure, **spread})
    return medians, ratios


def print_comparison(medians: list[Row], ratios: list[Row]) -> None:
    """Seconds of each side, then each ratio with its extremes."""
    for row in medians:
        print(f"  {row['side']:10}" + "".join(f"  {m} {row[m]:8.3f} s" for m in MEASURES if m in row))
    for row in ratios:
        what = f"{row['ratio']}, {row['measure']}"
        print(f"  {what:26}  {row['median']:8.2f}  ({row['min']:.2f} to {row['max']:.2f})")


def run(benchmark: Benchmark, rounds: int, *, quick: bool) -> Row:
    """Run one benchmark and print it; what it measured, for the file."""
    extra = benchmark.quick if quick else ()
    sides = {label: (*arguments, *extra) for label, arguments in benchmark.sides.items()}
    if len(sides) == 1:
        (arguments,) = sides.values()
        _, said = run_once((*arguments, "--rounds", str(rounds)) if benchmark.rounds_inside else arguments)
        said.setdefault("results", [said.copy()])
        for result in said["results"]:
            for key, value in result.items():
                print(f"  {key:45} {value:,.4g}" if isinstance(value, float) else f"  {key:45} {value}")
        return {"title": benchmark.title, "results": said["results"]}
    times = take_turns(sides, rounds)
    medians, ratios = compare(times)
    print_comparison(medians, ratios)
    return {"title": benchmark.title, "rounds": times, "medians": medians, "ratios": ratios}


def main() -> int:
    """Run what was asked for; 1 if a benchmark could not run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=sorted(BENCHMARKS), action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    record: Row = {"machine": machine(), "pinned_to": pin(), "rounds": arguments.rounds, "quick": arguments.quick}
    print(json.dumps(record["machine"], indent=2))
    failed = False
    record["benchmarks"] = {}
    for name in arguments.only or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        print(f"\n{name}: {benchmark.title}{' (quick: smaller than that)' if arguments.quick else ''}", flush=True)
        if why := missing(benchmark):
            record["benchmarks"][name] = {"skipped": why}
            print(f"  {why}")
            continue
        try:
            record["benchmarks"][name] = run(benchmark, arguments.rounds, quick=arguments.quick)
        except RuntimeError as error:
            failed = True
            record["benchmarks"][name] = {"error": str(error)}
            print(f"  failed, {error}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
