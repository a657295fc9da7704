"""Blocks on a Dask cluster: the numbers of this process, a worker killed or not, and clear words where it fails."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from klgrad import cli
from klgrad.analysis import cluster, montecarlo
from klgrad.analysis.montecarlo import Block, simulate
from klgrad.commands.folders import STORE
from klgrad.synth.configurations import parse
from klgrad.synth.presets import preset

CLUSTER = """
import sys, time
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        pids = [worker.pid for worker in cluster.workers.values()]
        print(cluster.scheduler_address, *pids, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def workers(tmp_path):
    """A scheduler's address and the process ids of its two workers."""
    pytest.importorskip("distributed")
    (tmp_path / "cluster.py").write_text(CLUSTER)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "cluster.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    address, *pids = process.stdout.readline().split()
    yield address, [int(pid) for pid in pids]
    process.stdin.close()
    process.stdout.close()
    process.wait(60)


def start(*arguments):
    command = [sys.executable, "-m", "klgrad.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process):
    errors = process.communicate(timeout=300)[1]
    return process.returncode, errors


COMPARE = ["compare", "--preset", "near", "--lengths", "40:70:10", "--trials", "300", "--samples", "1000"]
COMPARE += ["--config", "k3-in-both+rtg+prefix-ratio", "--config", "k1-in-reward+loo"]
DYNAMICS = ["dynamics", "--task", "answer", "--steps", "20", "--seeds", "2", "--staleness", "0,1,2,3,4,5,6,7"]
DYNAMICS += ["--ratio", "none", "--ratio", "token"]


@pytest.mark.slow
@pytest.mark.parametrize("request_", [COMPARE, DYNAMICS], ids=lambda each: each[0])
def test_two_worker_processes_one_killed_give_the_same_bytes(workers, tmp_path, request_):
    """The worker has blocks in hand when it goes: they are done again by the other, or by its successor."""
    address, pids = workers
    here, there = tmp_path / "here", tmp_path / "there"
    assert finish(start(*request_, "-q", "--out", here)) == (0, "")
    process = start(*request_, "-q", "--out", there, "--scheduler", address)
    deadline = time.monotonic() + 120
    while len(list((there / STORE).rglob("*.npz"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, finish(process)
    os.kill(pids[0], signal.SIGKILL)
    assert finish(process) == (0, "")
    for kind in ("csv", "json"):
        name = f"{request_[0]}.{kind}"
        assert (there / name).read_bytes() == (here / name).read_bytes()


def test_a_parcel_draws_what_its_task_draws():
    """Every estimator travels, also those whose functions have no name."""
    cloudpickle = pytest.importorskip("cloudpickle")
    pair, configurations = preset("stale"), tuple(map(parse, ["k2-in-loss", "k3-straight-through-in-both+loo"]))
    task = montecarlo.Task(pair, configurations, (3, 5), 10, 0, np.zeros((2, 2, pair.policy.parameters)))
    parcel = cluster.Parcel(cloudpickle.dumps(task), cluster.numerics())
    here, there = task.drawer()(Block(5, 2, 3)), cluster.draw_parcel(parcel, Block(5, 2, 3))
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_worker_with_another_numpy_is_refused():
    with pytest.raises(ValueError, match=r"this process numpy 0.1 on an abacus: the same numbers need the same"):
        cluster.draw_parcel(cluster.Parcel(b"", "numpy 0.1 on an abacus"), Block(1, 0, 2))


def test_without_distributed_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"pip install 'klgrad\[cluster\]'"):
        simulate(preset("near"), [parse("k1-in-loss")], [3], trials=2, samples=2, scheduler="tcp://nowhere:1")


def test_no_scheduler_at_the_address_is_one_sentence(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("KLGRAD_SCHEDULER", "tcp://127.0.0.1:9")
    done = CliRunner().invoke(cli.main, ["compare", "--lengths", "2", "--trials", "2", "--samples", "2"])
    assert done.exit_code == 2
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in done.stderr


def test_stored_blocks_need_no_scheduler(tmp_path):
    request = {"trials": 2, "samples": 2, "store": tmp_path}
    here = simulate(preset("near"), [parse("k1-in-loss")], [3], **request)
    again = simulate(preset("near"), [parse("k1-in-loss")], [3], scheduler="tcp://nowhere:1", **request)
    assert np.array_equal(here.gradients[0], again.gradients[0])
