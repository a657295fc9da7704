"""Mutation test of the core: every small wrong change of it must be caught by a test. ``make mutate`` runs this.

cosmic-ray makes the mutants and keeps the session, one for each module, which ``cr-report`` and ``cr-html`` read; an
interrupted run goes on from it, until the module changes. Mutants are made in a copy of the repository, and tests run
in a fork of this process, which has numpy, torch and pytest loaded. Tests that killed a neighbouring mutant go first,
then the others from quick to slow; CPU time is limited, so a busy machine changes nothing. A survivor that
``accepted.toml`` does not explain makes the exit status 1.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "mutation", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

import argparse
import ast
import difflib
import gc
import importlib
import json
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from itertools import accumulate
from pathlib import Path

import operators
import pytest
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOADED = ("numpy", "torch", "array_api_compat.torch", "scipy.sparse", "scipy.stats", "hypothesis.strategies")
QUICK = 4.0  # seconds of CPU time of the tests, quickest first, that every mutant has to pass; the others come after
SKIPPED = WorkResult(WorkerOutcome.SKIPPED)
PYTEST = ["-x", "-q", "--assert=plain", "--import-mode=importlib", "--tb=short", "-p", "no:cacheprovider"]


def slow_ones(seconds):
    """The tests beyond the first ``QUICK`` seconds of the quickest."""
    ranked = sorted(seconds, key=seconds.get)
    return {
        test for test, total in zip(ranked, accumulate(seconds[test] for test in ranked), strict=True) if total > QUICK
    }


class Order:
    """Puts the tests in order and tells the parent of the first failure, or of the time that each took."""

    def __init__(self, seconds, killers, slow, say):
        self.seconds, self.killers, self.slow, self.say, self.taken = seconds, killers, slow, say, {}
        self.later = slow_ones(seconds)

    def pytest_collection_modifyitems(self, items):
        if self.seconds:
            items[:] = [item for item in items if (item.nodeid in self.later) == self.slow]
        rank = {test: i for i, test in enumerate(self.killers)}
        items.sort(key=lambda item: (rank.get(item.nodeid, len(rank)), self.seconds.get(item.nodeid, 0.0)))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        begun = time.process_time()
        yield
        self.taken[item.nodeid] = time.process_time() - begun

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if self.seconds and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.say("failed", item.nodeid)  # without the report, which takes longer than many a test

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.say("failed", report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.say("failed", f"import of {report.nodeid}")

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.say("passed", self.taken)


def run_tests(copy, target, seconds=None, killers=(), *, slow=False, limit=600.0, log=os.devnull):
    """In a fork: ``(outcome, name of the failing test or seconds by test)``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def say(*what):
            sys.stdout.flush()
            os.write(writing, json.dumps(what).encode())
            os._exit(0)  # at once: taking a session down takes longer than many a test

        try:
            os.close(reading)
            gc.disable()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
            with open(log, "a") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.chdir(copy)
            sys.path[:] = [str(copy.parent), *(p for p in sys.path if p not in ("", str(HERE)))]
            sys.dont_write_bytecode = seconds is not None
            mutated = importlib.import_module("klgrad.synth").__file__
            assert Path(mutated) == copy / "synth" / "__init__.py", f"tests would import {mutated}"
            options = [*target["tests"], *(f"--deselect={test}" for test in target.get("without", []))]
            order = Order(seconds or {}, killers, slow, say)
            stopped = f"pytest stopped: {pytest.main([*PYTEST, *options], plugins=[order])}"
        except BaseException as problem:
            stopped = f"no pytest: {problem}"
        say("failed", stopped)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said)) if said else ("out of time", None)


def copy_of_the_repository(folder):
    """The tracked and new files, under the package's name; mutants are made there and not here."""
    listed = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    shutil.rmtree(folder, ignore_errors=True)
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def prepare(session, source, module, mutated):
    """Fills the session with the mutants of a module, without those of operators that are not chosen.

    Returns what is to be run: what has no result, and what survived before, since tests may have been added.
    """
    if not mutated.exists() or mutated.read_text() != source:
        init([Path(module)], session, {})
        mutated.write_text(source)
    lines = source.splitlines()
    for item in list(session.pending_work_items):
        (m,) = item.mutations
        after = lines[m.start_pos[0] - 1][m.start_pos[1] :]
        if not operators.CHOSEN.fullmatch(m.operator_name) or after.startswith(("*,", "**{")):  # no operators, these
            session.set_result(item.job_id, SKIPPED)
    alive = [item for item, result in session.completed_work_items if result.test_outcome == TestOutcome.SURVIVED]
    return sorted([*session.pending_work_items, *alive], key=importance)


def importance(item):
    """Terms, signs and operators first; then by place, so that neighbours find each other's killers."""
    (m,) = item.mutations
    return bool(operators.LATER.search(m.operator_name)), m.start_pos


def meaning(code):
    """What two ways to write one program have in common; ``None`` for what is none."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:
        return None


def change(diff):
    """``(was, now)``: the lines of a diff, stripped and joined."""
    sides = {
        sign: [line[1:].strip() for line in diff.split("\n") if line[:1] == sign and line[:3] != sign * 3]
        for sign in "-+"
    }
    return " ".join(sides["-"]), " ".join(sides["+"])


def run(target, out, *, slow):
    """Mutates one module; True where nothing unexplained survived."""
    module = target["module"]
    name = Path(module).stem
    copy = copy_of_the_repository(out / name / "klgrad")
    begun, (outcome, seconds) = time.monotonic(), run_tests(copy, target, log=out / name / "baseline.log")
    if outcome != "passed":
        sys.exit(f"{module}: its tests do not pass as it is: {seconds}; see {out / name / 'baseline.log'}")
    total = sum(seconds.values())
    print(f"{module}: {len(seconds)} tests, {total:.0f} s of CPU time, {len(slow_ones(seconds))} slow", flush=True)
    os.chdir(copy)
    killers, seen = [], {None, meaning((copy / module).read_text())}
    with use_db(str(out / f"{name}.sqlite"), WorkDB.Mode.create) as session:
        pending = prepare(session, (copy / module).read_text(), module, out / name / "mutated.py")
        for i, item in enumerate(pending):
            (m,) = item.mutations
            with use_mutation(m.module_path, get_operator(m.operator_name)(), m.occurrence) as (before, after):
                key = meaning(after)
                if key in seen:  # no program, or one that was there
                    session.set_result(item.job_id, SKIPPED)
                    continue
                seen.add(key)
                outcome, killer = run_tests(copy, target, seconds, killers, limit=20 + 4 * QUICK)
                if outcome == "passed" and slow:
                    outcome, killer = run_tests(copy, target, seconds, killers, slow=True, limit=20 + 4 * total)
            if outcome == "failed" and killer in seconds:
                killers = [killer, *(k for k in killers if k != killer)][:12]
            survived = outcome == "passed"
            diff = "\n".join(difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=0))
            session.set_result(
                item.job_id,
                WorkResult(
                    WorkerOutcome.NORMAL,
                    None if survived else killer or outcome,
                    TestOutcome.SURVIVED if survived else TestOutcome.KILLED,
                    diff,
                ),
            )
            if survived:
                was, now = change(diff)
                print(f"  {m.start_pos[0]}: {m.operator_name}\n    - {was}\n    + {now}", flush=True)
            elif i % 50 == 49:
                print(f"  {i + 1} of {len(pending)}, {time.monotonic() - begun:.0f} s", flush=True)
        return report(module, session, seconds)


def report(module, session, seconds):
    """Counts, and what survived without a reason."""
    accepted = tomllib.loads((HERE / "accepted.toml").read_text()).get(module, [])
    explained = {(entry["was"], now) for entry in accepted for now in entry["now"]}
    later = slow_ones(seconds)
    results = [result for _, result in session.results if result.worker_outcome != WorkerOutcome.SKIPPED]
    alive = [change(r.diff) for r in results if r.test_outcome == TestOutcome.SURVIVED]
    timed_out = sum(r.output == "out of time" for r in results)
    only_slow = Counter(r.output for r in results if r.output in later)
    open_ones = [pair for pair in alive if pair not in explained]
    print(
        f"{module}: {len(results)} mutants, {len(results) - len(alive)} killed ({timed_out} by time, "
        f"{only_slow.total()} by slow tests alone), {len(alive)} survived, {len(alive) - len(open_ones)} explained"
    )
    for test, n in only_slow.most_common():
        print(f"  slow: {n} by {test}")
    for was, now in open_ones:
        print(f"  SURVIVED\n    - {was}\n    + {now}")
    return not open_ones


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", help="such as synth/moments.py; all of targets.toml without")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutation")
    parser.add_argument("--no-slow", action="store_true", help="leave the slow tests out")
    options = parser.parse_args()
    targets = tomllib.loads((HERE / "targets.toml").read_text())["target"]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in LOADED:
        importlib.import_module(name)
    pytest.main(["--version"])  # loads its plugins
    gc.freeze()
    chosen = [t for t in targets if not options.modules or t["module"] in options.modules]
    held = [run(target, out, slow=not options.no_slow) for target in chosen]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
