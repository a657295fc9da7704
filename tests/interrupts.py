"""Ctrl-C in tests that themselves run in the background, where shells have it ignored."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def heed_interrupts():
    """For a child process, before it starts: what is ignored stays so across exec."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(*arguments):
    """A klgrad in a process group of its own, as a terminal makes one."""
    command = [sys.executable, "-m", "klgrad.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts, start_new_session=True
    )


def interrupted(process, *, group, within=20.0):
    """Send SIGINT to the process or to its whole group; the exit code, what it said, and whether anything is left.

    Raises:
        subprocess.TimeoutExpired: where it is not gone within so many seconds; it is killed then.
    """
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    try:
        errors = process.communicate(timeout=within)[1]
        return process.returncode, errors, _is_left(process.pid, within)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _is_left(group, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition, process, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


def children(process):
    """How many it has now."""
    return len(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())


def busy(process):
    """Seconds of CPU that it has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
