"""cli.py and cli_plan.py: which lines are read without typer, and that they are read as typer reads them."""

import inspect

import pytest
from typer.testing import CliRunner

from meshwright import cli
from meshwright.cli_plan import read_plain, show_plans

PLAIN = "plan gpt2 --cluster 8xh100-sxm --global-batch 64"


@pytest.mark.parametrize(
    "more",
    [
        "", "--sequence 512", "--precision fp32 --top 3", "--optimizer sgd --json plans.json", "--json a\u00e9.json", "--top 1",
    ],
)  # fmt: skip
def test_a_plain_line_is_read_as_typer_reads_it(monkeypatch, more: str):
    words, seen = f"{PLAIN} {more}".split(), []
    monkeypatch.setattr(cli, "show_plans", lambda *args, **kwargs: seen.append((args, kwargs)))
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    given = inspect.signature(show_plans)
    (args, kwargs), plain = seen[0], read_plain(words)
    assert plain is not None
    found = {name: value and str(value) for name, value in given.bind(*args, **kwargs).arguments.items()}
    mine = given.bind(**plain)
    mine.apply_defaults()
    assert found == {name: value and str(value) for name, value in mine.arguments.items()}


@pytest.mark.parametrize(
    "line",
    [
        "", "plan", "train run.toml", "plan --help", "plan gpt2 --cluster 8xh100-sxm", f"{PLAIN} --top 0", f"{PLAIN} --top -1",
        f"{PLAIN} --top ten", f"{PLAIN} --top 1_0", f"{PLAIN} --precision fp16", f"{PLAIN} --cluster 2xh100-sxm",
        f"{PLAIN} --top",
        f"{PLAIN} --strategies", f"{PLAIN} --batch a:b", f"{PLAIN} gpt2", f"{PLAIN} --top=3", f"{PLAIN} -- ", f"{PLAIN} --json -",
        PLAIN.replace("gpt2", "run.toml"), PLAIN.replace("gpt2", "mine:build"), PLAIN.replace("gpt2", "gp\x1bt2"),
        f"{PLAIN} --global-batch 8", f"{PLAIN} --devices 2", f"{PLAIN} --top \u0663",
    ],
)  # fmt: skip
def test_any_other_line_is_left_to_typer(line: str):
    assert read_plain(line.split(" ")) is None


@pytest.mark.parametrize("command", ["plan", "train", "schedule", "checkpoint", "--help", "plon"])
def test_a_command_that_is_built_alone_is_the_one_among_all(command: str):
    for words in ([command, "--help"], [command, "--strange"]):
        alone = CliRunner().invoke(cli._asked_for(words), words)
        among = CliRunner().invoke(cli.app, words)
        assert (alone.output, alone.exit_code) == (among.output, among.exit_code)
    assert len(cli.app.registered_commands) > 5


def test_help_names_every_command():
    text = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("train", "compare", "verify", "schedule"):
        assert command in text
