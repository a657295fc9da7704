"""Sweeps that are killed, doubled, or out of disk: the same bytes in the end, and never half a file."""

import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from klgrad.commands.folders import STORE
from klgrad.files import LOCK

REQUEST = ["compare", "-q", "--preset", "near", "--lengths", "30:60:10", "--trials", "120", "--samples", "1000"]
REQUEST += ["--config", "k3-in-both+rtg+prefix-ratio", "--workers", "2"]


def start(*arguments, **options):
    command = [sys.executable, "-m", "klgrad.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process):
    """Exit code and what it said on standard error."""
    errors = process.communicate(timeout=300)[1]
    return process.returncode, errors


def wait_for(found, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not found() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def kill_until_done(folder, kills, chance):
    """Kill a sweep again and again at random moments after its start; returns how often it was killed in its work."""
    store = folder / STORE
    struck = 0
    for _ in range(kills):
        before = len(list(store.rglob("*.npz")))
        process = start(*REQUEST, "--out", folder)
        wait_for(lambda seen=before: len(list(store.rglob("*.npz"))) > seen, process)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        struck += finish(process)[0] == -signal.SIGKILL
    assert finish(start(*REQUEST, "--out", folder)) == (0, "")
    return struck


def killed_gives_the_same_bytes(tmp_path, kills):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish(start(*REQUEST, "--out", whole)) == (0, "")
    assert kill_until_done(killed, kills, random.Random(7)) >= 1
    assert sorted(p.name for p in killed.iterdir()) == ["compare.csv", "compare.json"]
    for name in ("compare.csv", "compare.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_killed_sweeps_end_in_the_same_bytes(tmp_path):
    killed_gives_the_same_bytes(tmp_path, 2)


@pytest.mark.slow
def test_many_times_killed_sweeps_end_in_the_same_bytes(tmp_path):
    killed_gives_the_same_bytes(tmp_path, 25)


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    first = start(*REQUEST, "--out", tmp_path)
    wait_for(lambda: list((tmp_path / STORE).rglob("*.npz")), first)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        code, errors = finish(start(*REQUEST, "--out", tmp_path))
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert code == 2
    assert f"in use by another klgrad (process {first.pid})" in errors
    assert finish(first) == (0, "")
    assert not (tmp_path / LOCK).exists()


def limited(size):
    """What runs with files of at most this many bytes: a full disk, as a process without root can have one."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}


def test_a_full_disk_is_one_sentence_and_the_old_result_stays(tmp_path):
    small = ["compare", "-q", "--lengths", "2", "--trials", "2", "--samples", "2", "--out", tmp_path]
    assert finish(start(*small)) == (0, "")
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    code, errors = finish(start(*small, "--seed", "1", **limited(3000)))
    assert code == 2
    assert errors.startswith(f"Error: cannot write {tmp_path}")
    assert len(errors.strip().splitlines()) == 1
    now = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert now == old
    assert not list(tmp_path.rglob("*.part"))


def test_a_full_disk_keeps_finished_blocks(tmp_path):
    code, errors = finish(start(*REQUEST, "--out", tmp_path, **limited(100)))
    assert (code, errors.count("\n")) == (2, 1)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_pickle_in_a_pair_runs_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("policy_logits", "extra"):
        np.savez(tmp_path / "trap.npz", **{name: np.array([Trap()])})
        code, errors = finish(start("exact", "--pair", tmp_path / "trap.npz"))
        assert code == 2
        assert "cannot be read as .npz" in errors
    assert not (tmp_path / "ran").exists()
