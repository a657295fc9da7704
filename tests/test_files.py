"""A file is written whole or not at all."""

import pytest

from klgrad import files


def test_what_is_written_can_be_read(tmp_path):
    files.write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    files.write_whole(tmp_path / "kept", b"old")
    monkeypatch.setattr(files.os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.write_whole(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
