"""Many runs: blocks, workers, stored blocks and the table."""

import numpy as np
import pandas as pd
import pytest
from strategies import truncated_k3

from klgrad.analysis.dynamics import runs as module
from klgrad.analysis.dynamics.recipes import Algorithm, Run
from klgrad.analysis.dynamics.runs import BLOCK, COLUMNS, blocks, ends, store_of, study
from klgrad.analysis.dynamics.training import RECORDED, train
from klgrad.synth import objectives
from klgrad.synth.configurations import Configuration
from klgrad.synth.tasks import preset_task

FAMILY = objectives.family(preset_task("phase"))
START = FAMILY.parameters_of(FAMILY.task.pair.reference)
SMALL = Algorithm(samples=8)
RUNS = [
    Run(name, beta, 0.2, algorithm, seed)
    for algorithm in (SMALL, Algorithm("dr-grpo", samples=8, staleness=1))
    for seed in (0, 1)
    for name in ("k1-in-reward", "k3-in-loss", "none")
    for beta in (0.0, 0.3)
]


def test_blocks_hold_every_run_once_and_share_an_algorithm():
    many = [Run("k1-in-reward", 0.01 * i, 0.1, SMALL, seed) for seed in (0, 1) for i in range(BLOCK)]
    large = [Run("k1-in-reward", 0.1, 0.1, Algorithm(samples=1 << 16), seed) for seed in range(3)]
    every = [*many, *RUNS, *large]
    found = blocks(every, 6)
    assert sorted(i for block in found for i in block) == list(range(len(every)))
    for block in found:
        assert len(block) <= BLOCK
        assert len({every[i].algorithm for i in block}) == 1
    assert sum(every[block[0]] in large for block in found) == 3  # each fills a block


def test_the_table_is_what_each_run_did():
    frame = study(FAMILY, RUNS, 6, START, every=4)
    assert tuple(frame.columns) == COLUMNS
    assert frame["step"].drop_duplicates().tolist() == [0, 4, 6]
    assert len(frame) == 3 * len(RUNS)
    alone = train(FAMILY, [RUNS[9]], 6, START)
    mine = frame[27:30]
    assert (mine["configuration"].iloc[0], mine["beta"].iloc[0], mine["seed"].iloc[0]) == ("k3-in-loss", 0.3, 1)
    np.testing.assert_allclose(mine[list(RECORDED)].to_numpy(float), alone.measures[0, [0, 4, 6]], rtol=1e-9)
    assert mine["cosine"].isna().tolist() == [False, False, True]
    last = ends(frame)
    assert len(last) == len(RUNS)
    assert set(last["step"]) == {6}


def test_processes_change_nothing():
    one, two = (study(FAMILY, RUNS, 3, START, workers=n) for n in (1, 2))
    pd.testing.assert_frame_equal(one, two)


def test_blocks_done_elsewhere_change_nothing(tmp_path, monkeypatch):
    """What a cluster's worker is sent, without the cluster; what comes back is stored and taken up."""
    cloudpickle = pytest.importorskip("cloudpickle")

    def cluster(address, task, keep, todo):
        draw = cloudpickle.loads(cloudpickle.dumps(task)).drawer()
        for index, block in reversed(todo):
            keep(block, found := draw(block))
            yield index, found

    monkeypatch.setattr("klgrad.analysis.cluster.draw_on_cluster", cluster)
    here = study(FAMILY, RUNS, 3, START)
    there = study(FAMILY, RUNS, 3, START, scheduler="tcp://somewhere:8786", store=tmp_path)
    pd.testing.assert_frame_equal(here, there)
    monkeypatch.setattr("klgrad.analysis.cluster.draw_on_cluster", None)
    again = study(FAMILY, RUNS, 3, START, scheduler="tcp://somewhere:8786", store=tmp_path)
    pd.testing.assert_frame_equal(here, again)


def torn(content):
    return b"torn"


def said_to_be_encrypted(content):
    """Bit 0 of the flags in each entry of the archive's directory, which makes zipfile raise RuntimeError."""
    parts = content.split(b"PK\x01\x02")
    return b"PK\x01\x02".join([parts[0], *(part[:4] + bytes([part[4] | 1]) + part[5:] for part in parts[1:])])


@pytest.mark.parametrize("damage", [torn, said_to_be_encrypted])
def test_a_stored_run_goes_on_from_its_blocks(tmp_path, monkeypatch, damage):
    folder = store_of(tmp_path, FAMILY, RUNS, 3, START)
    whole = study(FAMILY, RUNS, 3, START, store=tmp_path)
    files = sorted(folder.glob("block-*.npz"))
    assert len(files) == len(blocks(RUNS, 6)) == 2
    files[1].write_bytes(damage(files[1].read_bytes()))
    trained, seen = [], []
    monkeypatch.setattr(module, "train", lambda *a, **k: trained.append(len(a[1])) or train(*a, **k))
    again = study(FAMILY, RUNS, 3, START, store=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert trained == [12]
    assert seen == [(3, 6), (4, 6), (5, 6), (6, 6), (6, 6)]  # the stored block, then updates
    pd.testing.assert_frame_equal(whole, again)


@pytest.mark.parametrize("change", ["steps", "start", "beta", "expected", "task"])
def test_another_request_has_another_store(tmp_path, change):
    base = store_of(tmp_path, FAMILY, RUNS, 3, START)
    other = {
        "steps": lambda: store_of(tmp_path, FAMILY, RUNS, 4, START),
        "start": lambda: store_of(tmp_path, FAMILY, RUNS, 3, START + 0.1),
        "beta": lambda: store_of(tmp_path, FAMILY, [Run("none", 0.2, 0.2, SMALL)], 3, START),
        "expected": lambda: store_of(tmp_path, FAMILY, RUNS, 3, START, expected=True),
        "task": lambda: store_of(tmp_path, objectives.family(preset_task("phase", 5)), RUNS, 3, START),
    }[change]()
    assert other != base


def test_another_estimator_under_the_same_name_has_another_store(tmp_path, monkeypatch):
    """Runs name their configuration; what the registry has under that name decides."""
    runs = [Run("k3-in-loss", 0.2, 0.2, SMALL)]
    before = store_of(tmp_path, FAMILY, runs, 3, START)
    monkeypatch.setattr(Run, "penalty", Configuration(truncated_k3(0.5, "k3"), "loss"))
    assert store_of(tmp_path, FAMILY, runs, 3, START) != before


def test_collapse_is_in_the_table():
    run = Run("k1-in-loss", 1.0, 1e8, SMALL)
    frame = study(FAMILY, [run, Run("k1-in-reward", 0.3, 0.1, SMALL)], 4, START)
    gone = frame[frame["learning_rate"] == 1e8]
    assert set(gone["collapsed"]) == {1}
    assert set(gone["cause"]) == {"the parameters run away"}
    assert gone["objective"].isna().tolist() == [False, True, True, True, True]
    assert set(frame[frame["learning_rate"] == 0.1]["collapsed"]) == {-1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"runs": []}, "no runs"), ({"steps": 0}, "steps = 0"), ({"every": 0}, "every = 0"), ({"steps": 10**8}, "fit")],
)
def test_a_wrong_request_is_named(changes, says):
    arguments = {"runs": RUNS, "steps": 3, "every": 1, **changes}
    with pytest.raises(ValueError, match=says):
        study(FAMILY, arguments["runs"], arguments["steps"], START, every=arguments["every"])
