"""Where ranks can share memory and where they cannot: then they use gloo, all of them, and one of them says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.faults.jobs import rank_jobs as jobs
from tests.faults.jobs import shm_jobs
from tests.faults.shm_ranks import Ranks, Zygote
from tests.faults.test_joined import free_port

from meshwright.errors import ConfigError, exit_code_of
from meshwright.ranks.launch import launch


def check(ranks: Ranks, backend: str, reason: str = "", level: str = "WARNING") -> None:
    """Every rank has this backend and the right results, and rank 0 alone has warned, once."""
    for missing in ranks.hear_all("prepared"):
        if missing:
            pytest.skip(missing)
    assert ranks.hear_all("backend") == [backend] * ranks.size, ranks.lines
    assert ranks.hear_all("right") == [True] * ranks.size
    assert ranks.hear_all("exit") == [0] * ranks.size
    told = [(line["rank"], line["level"], line["log"]) for line in ranks.lines if "log" in line]
    told = [each for each in told if "compiling" not in each[2]]
    if backend == "shm":
        assert told == []
    elif level == "WARNING":
        assert [each[:2] for each in told] == [(0, "WARNING")], told
    else:
        assert {each[1] for each in told} == {level}
    assert all(reason in text for _, _, text in told), told
    assert all("gloo" in text for _, _, text in told)


def test_a_small_dev_shm_is_enough(zygote: Zygote) -> None:
    # A container has 64 MiB unless it is told otherwise; what lives there raises SIGBUS when it is full.
    with zygote.ranks("exchange", 2, condition="little /dev/shm") as ranks:
        check(ranks, "shm")
        assert ranks.hear_all("dev_shm") == [1 << 20] * 2


def test_a_limit_on_the_size_of_files_of_the_rank_that_makes_the_segment(zygote: Zygote) -> None:
    with zygote.ranks("exchange", 2, condition="file size limit", ranks=[0], count=1000) as ranks:
        check(ranks, "gloo", "File too large")


def test_a_limit_on_the_size_of_files_of_another_rank(zygote: Zygote) -> None:
    with zygote.ranks("exchange", 2, condition="file size limit", ranks=[1], count=shm_jobs.BIG) as ranks:
        check(ranks, "shm")


def test_ranks_in_different_process_namespaces(zygote: Zygote) -> None:
    with zygote.ranks("exchange", 2, condition="process namespace", ranks=[1], count=1000) as ranks:
        check(ranks, "gloo", "different containers", level="DEBUG")
        assert ranks.said(1, "number") == [1]


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_a_rank_of_another_user(zygote: Zygote) -> None:
    with zygote.ranks("exchange", 2, condition="nobody", ranks=[1], count=1000) as ranks:
        check(ranks, "gloo", "different users", level="DEBUG")


@needs_root
def test_a_rank_of_another_user_without_the_extension(zygote: Zygote) -> None:
    with zygote.ranks("exchange", 2, condition="nobody without cache", ranks=[1], count=1000) as ranks:
        check(ranks, "gloo", "the cache directory")


@needs_root
def test_ranks_whose_files_the_kernel_keeps_closed(zygote: Zygote) -> None:
    # Whoever has changed users is no longer open to others, not even to those of its new user.
    with zygote.ranks("exchange", 3, condition="nobody", count=1000) as ranks:
        check(ranks, "gloo", "cannot reach the segment of rank 0")


# With rank 1 alone, the others have the extension already, and cannot use it without it.
@pytest.mark.parametrize("ranks_without", [[0, 1, 2], [1]])
def test_no_compiler(zygote: Zygote, ranks_without: list[int]) -> None:
    with zygote.ranks("exchange", 3, condition="no compiler", ranks=ranks_without, count=1000) as ranks:
        check(ranks, "gloo", "no C++ compiler was found")


def test_a_compiler_that_fails(zygote: Zygote, tmp_path: Path) -> None:
    env = {"CXX": "/bin/false", "MESHWRIGHT_CACHE": str(tmp_path)}
    with zygote.ranks("exchange", 2, env=env, count=1000) as ranks:
        check(ranks, "gloo", "false failed")
    assert not list(tmp_path.glob("build-*")), "objects of the failed build were left"
    assert not list(tmp_path.glob("*.so"))


def test_a_cache_that_others_can_write_to(zygote: Zygote, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with zygote.ranks("exchange", 2, env={"MESHWRIGHT_CACHE": str(tmp_path)}, count=1000) as ranks:
        check(ranks, "gloo", "can be written by, another user")


@pytest.mark.parametrize(("wanted", "backend"), [("", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_the_transport_that_the_environment_asks_for(zygote: Zygote, wanted: str, backend: str) -> None:
    env = {"MESHWRIGHT_TRANSPORT": wanted}
    with zygote.ranks("join_by_environment", 2, env=env, port=free_port()) as ranks:
        assert ranks.hear_all("backend") == [backend] * 2
        assert ranks.hear_all("right") == [True] * 2
        assert ranks.hear_all("exit") == [0, 0]
        assert not [line for line in ranks.lines if "log" in line]


def test_a_transport_that_does_not_exist(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"MESHWRIGHT_TRANSPORT": "bogus"}
    with zygote.ranks("join_by_environment", 2, env=env, port=free_port()) as ranks:
        # Rank 0 may be gone with its store before rank 1 has come to the question.
        codes, failed = ranks.hear_all("exit"), ranks.hear_all("failed")
        assert codes in ([2, 2], [2, 12]), failed
        for code, text in zip(codes, failed, strict=True):
            assert code != 2 or "ConfigError: MESHWRIGHT_TRANSPORT is 'bogus'" in text
    monkeypatch.setenv("MESHWRIGHT_TRANSPORT", "bogus")
    with pytest.raises(ConfigError, match="set it to shm or gloo") as caught:
        launch(jobs.nothing, 2)
    assert exit_code_of(caught.value) == 2
