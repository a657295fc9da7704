"""A real Ctrl-C, to the process or to its whole group: 130, one sentence, at once, and no process left over.

Each is interrupted in work that lasts minutes; that it is gone within twenty seconds leaves room for a slow machine.
"""

import sys
import time

import pytest
from interrupts import busy, children, interrupted, started, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are watched in /proc")

LONG = {
    "field": ["field", "--task", "pattern", "--beta", "0.1,0.2,0.3,0.4,0.5,1,2", "--lengths", "1:20"],
    "stability": ["stability", "--check", "3000"],
    "audit": ["audit"],
    "threads": [
        "compare", "--preset", "near", "--lengths", "1000", "--samples", "1000000", "--trials", "4", "--workers", "2",
        "--config", "k3-in-both+rtg+prefix-ratio",
    ],
}  # fmt: skip


@pytest.mark.parametrize("group", [True, False], ids=["group", "parent"])
def test_training_in_worker_processes_ends_at_once(tmp_path, group):
    """Each of the two blocks would take minutes."""
    process = started("dynamics", "--steps", "20000", "--seeds", "20", "--workers", "2", "--out", tmp_path / "out")
    wait_for(lambda: children(process) >= 3, process)  # two workers, and multiprocessing's own
    time.sleep(1)
    code, errors, left = interrupted(process, group=group)
    assert (code, errors, left) == (130, "interrupted\n", False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", LONG)
def test_a_long_command_ends_at_once(name):
    process = started(*LONG[name])
    wait_for(lambda: busy(process) > (2.5 if name == "threads" else 1.5), process)
    assert interrupted(process, group=name == "field") == (130, "interrupted\n", False)
