"""Other people's code in a process of its own, under limits: what goes wrong there costs one answer and nothing else.

The worker is started once, asked many times (one line of JSON each way), and replaced when it dies. Each call has a
limit of CPU and of wall-clock seconds; the process has a limit of memory, writes no file, and sees neither the
environment nor the folder that it was started from, but an empty one that goes away with it. These are limits on
resources, so that a runaway program cannot take the machine or the run with it. They are no security sandbox: the
worker runs as the same user, can read that user's files and reach the network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

_START = 180.0  # seconds to import packages in, on a slow disk too
_REPLY = 1 << 26  # bytes; a longer answer is a flood
_GRACE = 5.0  # a worker whose parent is gone outlives its own call by no more than this
_KEPT = ("SYSTEMROOT", "LD_LIBRARY_PATH")  # all of the environment that Python may need to start
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from klgrad.harness.isolation import serve; serve()"


@dataclass(frozen=True)
class Limits:
    """What one call may use: seconds of CPU, seconds by the clock, and the process's bytes of address space."""

    cpu: int = 10
    wall: float = 60.0
    memory: int = 2 << 30


class Worker:
    """An object in a process of its own, whose methods take and give JSON values.

    Args:
        name: what is run, for messages.
        target: ``module:callable`` that makes the object there.
        args: its arguments, JSON values.
        limits: of each call.

    Attributes:
        failures: calls that gave no answer, by cause.

    Raises:
        ValueError: when it cannot be started, with what the target said.
    """

    def __init__(self, name: str, target: str, *args: Any, limits: Limits | None = None) -> None:
        self.name, self.limits = name, limits or Limits()
        self.failures: Counter[str] = Counter()
        self._first = {"target": target, "args": args, "limits": asdict(self.limits)}
        self._lock = threading.Lock()
        self._end: Callable[[], Any] | None = None
        missing = self._start()
        if missing:
            _say(f"this system does not limit {' and '.join(missing)} of {name}: only the clock stops it")

    def call(self, method: str, *args: Any, otherwise: Any = None) -> Any:
        """The method's result, or ``otherwise`` where it failed: the cause is counted, and the first one is said."""
        with self._lock:
            if self._end is None:
                self._start()
            try:
                answer = self._ask({"method": method, "args": args}, self.limits.wall)
            except _Died as died:
                answer = {"error": str(died)}
            if "error" not in answer:
                return answer["value"]
            self.failures[answer["error"].partition(":")[0]] += 1
            if self.failures.total() == 1:
                _say(
                    f"{self.name}: a problem failed ({answer['error'][:200]}); it scores 0, later ones are only counted"
                )
            return otherwise

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._end is not None:
            self._end()
            self._end = None

    def _start(self) -> list[str]:
        folder = tempfile.mkdtemp(prefix="klgrad-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *map(_from_anywhere, sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=folder, env=_environment(folder), start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, folder)
        try:
            answer = self._ask(self._first, _START)
        except _Died as died:
            raise ValueError(f"the worker for {self.name} cannot start: {died}") from None
        if "error" in answer:
            self.close()
            kind, _, sentence = answer["error"].partition(": ")
            text = sentence if kind == "ValueError" else f"the worker for {self.name} cannot start: {answer['error']}"
            raise ValueError(text)
        return list(answer["value"])

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """One line there and one back; the process is ended when that does not work out, also by an interruption."""
        process, late = self._process, threading.Event()
        assert process.stdin is not None
        assert process.stdout is not None

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(_REPLY)
            except OSError:
                line = b""
            finally:
                timer.cancel()
                timer.join()
            if late.is_set():
                raise _Died(f"more than {seconds:g} s by the clock")
            if not line.endswith(b"\n"):
                raise _Died(_cause(process, self.limits) if not line else f"an answer of more than {_REPLY} bytes")
            try:
                answer: dict[str, Any] = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _Died(f"no answer that can be read: {error}") from None
            return answer
        except BaseException:
            self.close()
            raise


class _Died(Exception):
    """The worker gave no answer."""


def _environment(folder: str) -> dict[str, str]:
    own = {
        "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the order of sets is part of some programs' output
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
    return {key: os.environ[key] for key in _KEPT if key in os.environ} | own


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # an unsent request is flushed on closing
                pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _cause(process: subprocess.Popen[bytes], limits: Limits) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    if code == -getattr(signal, "SIGXCPU", 0):
        return f"more than {limits.cpu} s of CPU"
    said = process.stderr.read(10_000).decode(errors="replace").strip() if process.stderr is not None else ""
    return f"it ended by itself, with code {code}" + (f": {said.splitlines()[-1]}" if said else "")


def _say(sentence: str) -> None:
    logging.getLogger("klgrad").warning("note: %s", sentence)


# ------------------------------------------------------------------------------------------- the worker's own side


def serve() -> None:
    """Make the object that the first line names, then answer a call a line until there are no more."""
    folder = os.getcwd()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what the code prints goes nowhere, what it reads is empty
        os.dup2(nowhere, descriptor)
    first = json.loads(requests.readline())
    limits, made = Limits(**first["limits"]), {}

    def make() -> list[str]:
        missing = _limit(limits.memory)
        module, _, name = first["target"].partition(":")
        made["object"] = getattr(import_module(module), name)(*first["args"])
        return missing

    _reply(replies, make)
    import faulthandler

    for line in requests:
        call = json.loads(line)
        _allow_cpu(limits.cpu)
        faulthandler.dump_traceback_later(limits.wall + _GRACE, exit=True, file=nowhere)
        _reply(replies, lambda call=call: getattr(made["object"], call["method"])(*call["args"]))  # type: ignore[misc]
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(OSError):  # of a parent that was killed, nobody else tidies up
        os.rmdir(folder)


def _from_anywhere(entry: str) -> str:
    """An entry of sys.path for another working folder; what is no path is a finder's (of an editable installation)."""
    return os.path.abspath(entry) if not entry or os.path.exists(entry) else entry


def _reply(replies: Any, work: Callable[[], Any]) -> None:
    try:
        text = json.dumps({"value": work()})
    except BaseException as error:  # SystemExit as well: the code is not ours
        text = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
    replies.write(text.encode() + b"\n")
    replies.flush()


def _limit(memory: int) -> list[str]:
    """Set what lasts; returns what this system cannot limit."""
    try:
        import resource
    except ImportError:
        return ["the CPU time", "the memory", "the files"]
    missing = []
    wanted = (("the memory", resource.RLIMIT_AS, memory), ("the files", resource.RLIMIT_FSIZE, 0))
    for what, kind, most in (*wanted, ("core dumps", resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            missing.append(what)
    return missing


def _allow_cpu(seconds: int) -> None:
    """So many seconds more; the system kills beyond them."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
