"""Work in processes and threads of its own: an interruption ends it at once, and no lost parent leaves it running.

Ctrl-C goes to every process of a terminal's group: workers never see it (SIGINT is blocked while they are started, and
stays so), the parent alone decides and ends them. They hear SIGTERM as SystemExit, so that what they were writing is
tidied up. Threads hear an exception between two operations.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar

Result = TypeVar("Result")
_GRACE = 0.5  # seconds to tidy up in; a worker inside one long operation is then killed


def in_processes(
    jobs: Sequence[Callable[[], Result]], workers: int, keep: Callable[[int, Result], None] = lambda *_: None
) -> Generator[tuple[int, Result]]:
    """Yield (index, result) of each job as it is done, after ``keep(index, result)``.

    Whatever ends this early (an interruption, a job's exception, ``close``) keeps what was done and ends the workers.

    Args:
        jobs: what can be pickled, each called once in some worker.
        workers: processes at most.
    """
    if not jobs:
        return
    from concurrent.futures import Future, ProcessPoolExecutor, as_completed

    context, waiting = _Recording(), dict[Future[Result], int]()

    def kept(future: Future[Result]) -> tuple[int, Result]:
        index, result = waiting.pop(future), future.result()
        keep(index, result)
        return index, result

    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _as_worker)
    try:
        with _interrupts_held():
            waiting |= {pool.submit(_worked, job): index for index, job in enumerate(jobs)}
        for future in as_completed(list(waiting)):
            yield kept(future)
    except BaseException:
        try:
            for future in [f for f in waiting if f.done() and not f.cancelled() and f.exception() is None]:
                kept(future)
        finally:
            context.end()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Recording(SpawnContext):
    """A fresh interpreter for each process, which is remembered."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def Process(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]  # what the pool calls
        process = super().Process(*args, **named)
        self.started.append(process)
        return process

    def end(self) -> None:
        """Ask all of them, and kill those that do not go."""
        running = [process for process in self.started if process.pid is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started here have SIGINT blocked for good; one that comes meanwhile is raised at the end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's own process: starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_worker() -> None:
    """What each worker does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where signals cannot be blocked
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _worked(job: Callable[[], Result]) -> Result:
    try:
        return job()
    except SystemExit:  # the pool would send it back and go on with the next job
        os._exit(1)


class Stopped(BaseException):
    """Raised in a thread whose work is no longer wanted."""


class Stoppable:
    """A context for the work of threads; ``stop`` ends it where it is, within one operation of numpy's."""

    def __init__(self) -> None:
        self._lock, self._inside, self._stopped = threading.Lock(), set[int](), False

    def __enter__(self) -> None:
        with self._lock:
            if self._stopped:
                raise Stopped
            self._inside.add(threading.get_ident())

    def __exit__(self, *raised: object) -> None:
        with self._lock:  # nobody leaves while exceptions are handed out, so none arrives outside
            self._inside.discard(threading.get_ident())

    def stop(self) -> None:
        """Raise ``Stopped`` in every thread that is inside, and in those that come."""
        import ctypes

        with self._lock:
            self._stopped = True
            for thread in self._inside:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
