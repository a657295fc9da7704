"""A file is written whole or not at all; a folder is used by one process at a time."""

import os
import subprocess
import sys

import pytest

from klgrad import files

USE = """
import os, pathlib
from klgrad.files import sole_use
with sole_use(pathlib.Path({folder!r})):
    {work}
"""


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_what_is_written_can_be_read(tmp_path):
    files.write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    files.write_whole(tmp_path / "kept", b"old")
    monkeypatch.setattr(files.os, "replace", no_space)
    with pytest.raises(OSError, match=r"cannot write .*kept: No space left on device; .* untouched"):
        files.write_whole(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_files_that_belong_together_change_together(tmp_path, monkeypatch):
    files.write_together({tmp_path / "a": b"old", tmp_path / "b": b"old"})
    real, calls = os.fdopen, []

    def second_fails(handle, mode):
        calls.append(handle)
        file = real(handle, mode)
        if len(calls) == 2:
            file.close()
            no_space()
        return file

    monkeypatch.setattr(files.os, "fdopen", second_fails)
    with pytest.raises(OSError, match=r"cannot write .*b: No space"):
        files.write_together({tmp_path / "a": b"new", tmp_path / "b": b"new"})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    code = USE.format(folder=str(tmp_path), work="pass")
    with files.sole_use(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"in use by another klgrad (process {os.getpid()})" in other.stderr
    assert list(tmp_path.iterdir()) == []
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_killed_owner_holds_nothing(tmp_path):
    code = USE.format(folder=str(tmp_path), work="os.kill(os.getpid(), 9)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / files.LOCK).exists()
    (tmp_path / f".a.csv.x{files.PART}").write_bytes(b"half")
    with files.sole_use(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [files.LOCK]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_is_not_taken_for_ours(tmp_path, monkeypatch):
    """Its owner left between our opening and our locking: the next one would make a new file beside our lock."""
    real, seen = files._same_file, []

    def removed_once(path, descriptor):
        if not seen:
            path.unlink()
        seen.append(path)
        return real(path, descriptor)

    monkeypatch.setattr(files, "_same_file", removed_once)
    with files.sole_use(tmp_path):
        assert (tmp_path / files.LOCK).exists()
    assert len(seen) == 2


def test_no_locks_no_refusal(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with files.sole_use(tmp_path), files.sole_use(tmp_path):
        assert list(tmp_path.iterdir()) == []
