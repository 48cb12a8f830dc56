"""train/data/sources.py: what the sources hold, and that training and held-out samples are apart."""

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.spec.plan import Plan
from meshwright.train.config.types import TrainConfig
from meshwright.train.data.sources import (
    ByteWindows,
    collate_for_causal_lm,
    is_held_out,
    load_data,
    make_collate,
    stdlib_files,
)


def make_config(folder, *, target="m:build", **data):
    return TrainConfig.model_validate(
        {
            "model": {"target": target},
            "data": data,
            "optimizer": {"lr": 0.1},
            "train": {"steps": 1, "global_batch_size": 1},
            "base_directory": str(folder),
            "plan": Plan(),
        }
    )


def test_windows_overlap_by_the_byte_that_is_predicted():
    windows = ByteWindows(torch.arange(11, dtype=torch.uint8), 5)
    assert len(windows) == 2
    inputs, targets = windows[1]
    assert inputs.tolist() == [5, 6, 7, 8, 9]
    assert targets.tolist() == [6, 7, 8, 9, 10]
    assert inputs.dtype == torch.int64
    with pytest.raises(IndexError, match="window 2 of 2"):
        windows[2]


def test_a_text_that_misses_the_last_target_has_one_window_less():
    assert len(ByteWindows(torch.zeros(10, dtype=torch.uint8), 5)) == 1
    assert len(ByteWindows(torch.zeros(0, dtype=torch.uint8), 5)) == 0


def test_stdlib_is_sorted_and_without_what_differs_between_machines(tmp_path):
    for name in ("b.py", "a.py", "pkg/z.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)] == ["a.py", "b.py", "pkg/z.py"]


def test_stdlib_splits_are_real_text_and_capped(tmp_path):
    config = make_config(tmp_path, source="python-stdlib", sequence_length=64, max_bytes=200_000)
    train, held_out = load_data(config, "train"), load_data(config, "eval")
    assert train.text.numel() == 200_000
    assert 0 < held_out.text.numel() <= 22_223
    assert b"def " in bytes(train.text.numpy())
    assert bytes(held_out.text[:200].numpy()) not in bytes(train.text.numpy())


def test_held_out_files_follow_from_their_names_alone():
    names = [f"module_{i}.py" for i in range(2000)]
    share = sum(is_held_out(name, 0.1) for name in names) / len(names)
    assert 0.07 < share < 0.13
    assert is_held_out("ast.py", 0.5) == is_held_out("ast.py", 0.5)
    assert all(is_held_out(name, 1.0) for name in names)
    assert not any(is_held_out(name, 0.0) for name in names)


def test_the_end_of_every_file_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 80 + b"A" * 20)
    (tmp_path / "b.txt").write_bytes(b"b" * 80 + b"B" * 20)
    config = make_config(tmp_path, source="files", files=["*.txt"], eval_fraction=0.2, sequence_length=4)
    assert bytes(load_data(config, "train").text.numpy()) == b"a" * 80 + b"b" * 80
    assert bytes(load_data(config, "eval").text.numpy()) == b"A" * 20 + b"B" * 20


def test_own_held_out_files_leave_the_training_text_whole(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"t" * 100)
    (tmp_path / "held.txt").write_bytes(b"h" * 50)
    config = make_config(tmp_path, source="files", files=["train.txt"], eval_files=["held.txt"], sequence_length=4)
    assert load_data(config, "train").text.numel() == 100
    assert bytes(load_data(config, "eval").text.numpy()) == b"h" * 50


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    config = make_config(tmp_path, source="files", files=["*.txt"], sequence_length=128)
    with pytest.raises(ConfigError, match=r"at least data\.sequence_length \+ 1 = 129"):
        load_data(config, "train")


def test_digits_are_split_without_overlap(tmp_path):
    pytest.importorskip("sklearn")
    config = make_config(tmp_path, source="digits", eval_fraction=0.2)
    train, held_out = load_data(config, "train"), load_data(config, "eval")
    assert len(train) + len(held_out) == 1797
    assert len(held_out) == 359
    image, digit = train[0]
    assert image.shape == (1, 8, 8)
    assert image.min() >= 0
    assert image.max() <= 1
    assert digit.dtype == torch.int64
    assert set(held_out.classes.tolist()) == set(range(10))


def test_a_callable_source_gets_its_split_and_arguments(tmp_path):
    (tmp_path / "user_data_source.py").write_text("def make(split, size):\n    return [split] * size\n")
    config = make_config(tmp_path, source="user_data_source:make", kwargs={"size": 2})
    assert load_data(config, "eval") == ["eval", "eval"]
    empty = make_config(tmp_path, source="user_data_source:make", kwargs={"size": 0})
    with pytest.raises(ConfigError, match="split 'train' has no sample"):
        load_data(empty, "train")


def test_hugging_face_models_get_labels_that_they_shift_themselves(tmp_path):
    config = make_config(tmp_path, target="hf:config.json", source="python-stdlib")
    assert make_collate(config) is collate_for_causal_lm
    assert make_collate(make_config(tmp_path, source="python-stdlib")) is None
    windows = ByteWindows(torch.arange(9, dtype=torch.uint8), 4)
    batch = collate_for_causal_lm([windows[0], windows[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()


def test_a_source_that_returns_no_dataset_is_named(tmp_path):
    (tmp_path / "gives_nothing.py").write_text("def data(split='train'):\n    pass\n")
    with pytest.raises(ConfigError, match="'gives_nothing:data' returned a NoneType for split 'train'") as caught:
        load_data(make_config(tmp_path, source="gives_nothing:data"), "train")
    assert "def data(split='train')" in str(caught.value.fix)
