"""texts.py: files and JSON from outside, within limits; nothing that steers a terminal."""

import os
from pathlib import Path

import pytest

from meshwright.texts import clean, is_directory, is_file, parse_json, read_text, refuse_surrogates


def test_control_characters_and_halves_of_pairs_are_never_shown():
    assert clean("a\x1b[2Jb\x00c\u202ed\ud800e\n\tf") == "abcd?e\n\tf"


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(OSError, match=f"it is {what} "):
            read_text(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\ud800"])
def test_names_that_no_file_can_have_are_an_oserror_and_not_a_file(name):
    with pytest.raises(OSError, match=r"file name|File name|No such file"):
        read_text(name)
    assert not is_file(Path(name))
    assert not is_directory(Path(name))


def test_a_large_file_and_one_that_is_not_text_are_refused_with_numbers(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 101)
    with pytest.raises(OSError, match=r"101 bytes or more \(rule: at most 100\)"):
        read_text(path, most_bytes=100)
    path.write_bytes(b"ab\xff")
    with pytest.raises(OSError, match="byte 2 is 0xff"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("9" * 5000, "a number has 5000 digits"),
        ("[" * 5000 + "]" * 5000, "nested more than 100 deep"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested more than 100 deep"),
        (r'{"a": "\ud800"}', "half of a surrogate pair"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
        ("{", "Expecting"),
    ],
)
def test_json_beyond_the_limits_is_a_valueerror(text, what):
    with pytest.raises(ValueError, match=what):
        parse_json(text)


def test_json_within_the_limits_is_what_it_says():
    assert parse_json('{"a": [1, -2.5, "[[[[", null, {"b": "}"}]}') == {"a": [1, -2.5, "[[[[", None, {"b": "}"}]}
    assert parse_json("9" * 300) == int("9" * 300)
    refuse_surrogates({"a": ["\U0001f600"]})
