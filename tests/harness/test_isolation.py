"""Whatever a call does, it costs that call alone: it is counted, said once, and the next one is answered."""

import logging
import os
import time
from pathlib import Path

import pytest

from klgrad.harness.isolation import Limits, Worker, _from_anywhere

pytest.importorskip("resource")

CODE = """
import os, signal, sys, time
class Wild:
    def __init__(self, start=""): exec(start)
    def double(self, x): return 2 * x
    def run(self, code):
        found = {}
        exec(code, found)
        return found.get("value")
"""
LIMITS = Limits(cpu=1, wall=20.0, memory=1 << 30)
BAD = {
    "infinite loop": ("while True: pass", "more than 1 s of CPU"),
    "memory": ("x = bytearray(1 << 32)", "MemoryError"),
    "a file": ("f = open('big', 'w'); f.write('x'); f.flush()", "OSError"),
    "a file of holes": ("open('big', 'wb').truncate(1 << 40)", "OSError"),
    "hard exit": ("import os; os._exit(3)", "it ended by itself, with code 3"),
    "polite exit": ("raise SystemExit(0)", "SystemExit"),
    "exception": ("1 / 0", "ZeroDivisionError"),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it ended by itself, with code -11"),
    "no JSON": ("value = {1, 2}", "TypeError"),
    "a number too long to read": ("value = 1 << 100_000", "ValueError"),
}


@pytest.fixture
def wild(tmp_path, monkeypatch):
    (tmp_path / "wild_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    workers = []

    def make(*args, limits=LIMITS):
        workers.append(Worker("wild", "wild_code:Wild", *args, limits=limits))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def test_each_failure_costs_one_answer_and_is_said_once(wild, caplog):
    worker = wild()
    for code, cause in BAD.values():
        before = worker.failures[cause]
        assert worker.call("run", code, otherwise=0.0) == 0.0
        assert worker.failures[cause] == before + 1, worker.failures
        assert worker.call("double", 21) == 42
    assert worker.failures.total() == len(BAD)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "later ones are only counted" in said[0]


def test_a_flood_of_an_answer_is_cut_off(wild):
    worker = wild(limits=Limits(cpu=30, wall=60.0, memory=1 << 30))  # writing so much takes a slow machine a second
    assert worker.call("run", "value = 'x' * (1 << 26)", otherwise=0.0) == 0.0
    assert dict(worker.failures) == {"an answer of more than 67108864 bytes": 1}
    assert worker.call("double", 1) == 2


def test_the_clock_stops_what_uses_no_cpu(wild):
    worker = wild(limits=Limits(cpu=1, wall=1.0))
    began = time.monotonic()
    assert worker.call("run", "import time; time.sleep(600)", otherwise=0.0) == 0.0
    assert time.monotonic() - began < 30
    assert dict(worker.failures) == {"more than 1 s by the clock": 1}
    assert worker.call("double", 1) == 2


def test_what_it_prints_and_reads_goes_nowhere(wild):
    worker = wild()
    flood = "import os\nfor _ in range(2000):\n    print('x' * 1000)\n    os.write(1, b'y' * 1000); os.write(2, b'z')"
    assert worker.call("run", flood + "\nvalue = 'done'") == "done"
    assert worker.call("run", "import sys; value = sys.stdin.read()") == ""
    assert not worker.failures


def test_children_end_with_it(wild, tmp_path):
    worker = wild(limits=Limits(cpu=1, wall=2.0))
    child = "import os, time\nvalue = os.fork()\nif not value:\n    time.sleep(600)"
    pid = worker.call("run", child)
    os.kill(pid, 0)  # it is there
    worker.close()
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def test_it_sees_no_environment_and_an_empty_folder_that_goes_away(wild, monkeypatch):
    monkeypatch.setenv("KLGRAD_SECRET", "word")
    worker = wild()
    found = worker.call("run", "import os; value = [dict(os.environ), os.getcwd(), os.listdir()]")
    assert "KLGRAD_SECRET" not in found[0]
    assert found[1] != os.getcwd()
    assert found[2] == []
    worker.close()
    assert not Path(found[1]).exists()


def test_an_interruption_leaves_no_half_answer(wild, monkeypatch):
    worker = wild()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("klgrad.harness.isolation.json.loads", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.call("double", 4)
    assert worker.call("double", 5) == 10


def test_hash_order_is_the_same_in_every_worker(wild):
    order = "value = list({str(i) for i in range(100)})"
    one, two = (wild().call("run", order) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("target", "start", "sentence"),
    [
        ("wild_code:Wild", "raise ValueError('needs the package x: pip install x')", "^needs the package x"),
        ("wild_code:Wild", "import nowhere", "the worker for w cannot start: ModuleNotFoundError: No module named"),
        ("wild_code:Wild", "import os; os._exit(7)", "the worker for w cannot start: it ended by itself, with code 7"),
        ("nothing_here:Wild", "", "the worker for w cannot start: ModuleNotFoundError"),
    ],
)
def test_a_worker_that_cannot_start_is_one_sentence(wild, target, start, sentence):
    with pytest.raises(ValueError, match=sentence):
        Worker("w", target, start)


def test_python_that_does_not_run_is_one_sentence(monkeypatch):
    monkeypatch.setattr("klgrad.harness.isolation._BOOT", "import klgrad_is_nowhere")
    with pytest.raises(ValueError, match="with code 1: ModuleNotFoundError: No module named 'klgrad_is_nowhere'"):
        Worker("w", "a:b")


def test_without_resource_the_clock_is_left_and_that_is_said(wild, monkeypatch, caplog):
    from klgrad.harness import isolation

    boot = isolation._BOOT.replace("import sys;", "import sys; sys.modules['resource'] = None;")
    monkeypatch.setattr(isolation, "_BOOT", boot)
    worker = wild(limits=Limits(cpu=1, wall=2.0))
    assert "does not limit the CPU time and the memory and the files of wild: only the clock stops it" in caplog.text
    assert worker.call("run", "while True: pass", otherwise=0.0) == 0.0
    assert worker.call("double", 2) == 4


def test_a_finder_s_entry_of_the_path_travels_as_it_is(tmp_path, monkeypatch):
    """An editable installation is found through an entry that is no path, and a worker starts in another folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    finder = "__editable__.package-1.0.finder.__path_hook__"
    assert [_from_anywhere(entry) for entry in ("", "here", finder)] == [str(tmp_path), str(tmp_path / "here"), finder]
