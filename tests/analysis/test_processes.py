"""Work in processes and threads: what is done is kept, the rest ends at once, and nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from multiprocessing import active_children

import pytest

from klgrad.analysis.processes import Stoppable, Stopped, in_processes

AT_ONCE = 20.0  # seconds, on a slow machine; what is ended would take an hour
HOUR = partial(time.sleep, 3600)


def test_every_job_is_done_once_and_kept():
    kept = {}
    found = dict(in_processes([partial(pow, 2, i) for i in range(5)], 2, kept.__setitem__))
    assert found == kept == {i: 2**i for i in range(5)}
    assert list(in_processes([], 2)) == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt, GeneratorExit])
def test_what_ends_it_early_keeps_what_is_done_and_ends_the_workers(raised):
    kept, began = {}, []

    def interrupted():
        with closing(in_processes([partial(pow, 2, 3), HOUR, HOUR], 3, kept.__setitem__)) as jobs:
            for _ in jobs:
                began.append(time.monotonic())
                raise raised

    with pytest.raises(raised):
        interrupted()
    assert time.monotonic() - began[0] < AT_ONCE
    assert kept == {0: 8}
    assert active_children() == []


def test_a_job_s_exception_is_raised_here_and_ends_the_others():
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        list(in_processes([partial(divmod, 1, 0), HOUR], 2))
    assert time.monotonic() - began < AT_ONCE + 60  # starting included
    assert active_children() == []


ORPHANS = """
import time
from functools import partial
from multiprocessing import active_children
from klgrad.analysis.processes import in_processes
if __name__ == "__main__":
    jobs = in_processes([partial(pow, 2, 3), partial(time.sleep, 3600), partial(time.sleep, 3600)], 3)
    next(jobs)
    print(*[child.pid for child in active_children()], flush=True)
    next(jobs)
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "orphans.py")], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 3
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + AT_ONCE
    while time.monotonic() < deadline and any(map(_runs, workers)):
        time.sleep(0.05)
    assert not any(map(_runs, workers))


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody may be there to collect it
    except FileNotFoundError:
        return False


def test_a_thread_s_work_stops_where_it_is_and_later_work_does_not_begin():
    working, seen, stopped = Stoppable(), threading.Event(), []

    def work():
        try:
            with working:
                seen.set()
                while True:
                    time.sleep(0.001)
        except Stopped:
            stopped.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    assert seen.wait(AT_ONCE)
    working.stop()
    thread.join(AT_ONCE)
    assert stopped == [True]
    with pytest.raises(Stopped), working:
        pass
