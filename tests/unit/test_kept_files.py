"""kept_files.py: what is kept between runs is read as it was written, or not at all."""

import os

import pytest

from meshwright.kept_files import keep_file, read_kept_file


def test_what_was_kept_is_read_and_replaced(tmp_path):
    path = tmp_path / "a"
    for data in (b"", b"first", b"second\nsha256 x\n"):
        keep_file(path, data)
        assert read_kept_file(path) == data
    assert os.listdir(tmp_path) == ["a"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_other_length_and_every_flipped_byte_is_refused(tmp_path):
    path = tmp_path / "a"
    keep_file(path, b"contents")
    whole = path.read_bytes()
    for damaged in (
        *(whole[:length] for length in range(len(whole))),
        *(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :] for place in range(len(whole))),
        whole + b"x",
    ):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="damaged"):
            read_kept_file(path)


def test_links_foreign_files_and_what_is_no_file_are_refused(tmp_path, monkeypatch):
    path, link = tmp_path / "a", tmp_path / "b"
    keep_file(path, b"contents")
    link.symlink_to(path)
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        read_kept_file(link)
    with pytest.raises(FileNotFoundError):
        read_kept_file(tmp_path / "c")
    with pytest.raises(OSError, match="a directory"):
        read_kept_file(tmp_path)
    path.chmod(0o622)
    with pytest.raises(PermissionError, match="another user"):
        read_kept_file(path)
    path.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        read_kept_file(path)


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a"
    keep_file(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        keep_file(path, b"new")
    assert read_kept_file(path) == b"old"
    assert os.listdir(tmp_path) == ["a"]
