"""cli.py: messages, exit codes, and what the launching process never imports."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from meshwright import __version__, cli
from meshwright.cli_errors import refuse_unwritable
from meshwright.errors import StorageError, UserCodeError
from meshwright.train import launcher

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_python.toml"


def run_main(monkeypatch, capsys, *arguments):
    """Run the command as the entry point does; returns (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_an_error_of_the_users_code_shows_its_own_frames(monkeypatch, capsys):
    def fail():
        raise ValueError("the user's own")

    broken = typer.Typer(pretty_exceptions_enable=False)
    broken.command()(fail)
    monkeypatch.setattr(cli, "app", broken)
    code, _, err = run_main(monkeypatch, capsys)
    assert code == UserCodeError.exit_code
    assert "in fail" in err
    assert err.rstrip().endswith("ValueError: the user's own")
    assert "click" not in err
    assert "typer" not in err.replace("typer.Typer", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe", "-o", "no/such/folder/x.json"),
        ("probe", "-o", "."),
        ("compare", str(EXAMPLE), "--plans", "single", "--json", "no/such/x.json"),
        ("compare", str(EXAMPLE), "--plans", "single", "--report", "no/such/x.html"),
        ("verify", str(EXAMPLE), "--plan", "dp=2", "--json", "no/such/x.json"),
    ],
)
def test_a_file_of_results_that_cannot_be_written_is_told_before_the_work(in_tmp, monkeypatch, capsys, arguments):
    def works(*_args, **_kwargs):
        raise AssertionError("it has begun")

    for name in (
        "measure.probe.probe_cluster",
        "compare.command.run_comparison",
        "compare.verify_config.run_verification",
    ):
        monkeypatch.setattr(f"meshwright.{name}", works)
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == StorageError.exit_code
    assert "cannot be written" in err
    assert "fix: " in err
    assert list(in_tmp.iterdir()) == []


def test_a_file_of_results_keeps_what_is_in_it_until_they_are_there(in_tmp):
    (in_tmp / "x.json").write_text("before")
    refuse_unwritable("-o", in_tmp / "x.json")
    refuse_unwritable("-o", in_tmp / "new.json")
    refuse_unwritable("-o", None)
    assert [(path.name, path.read_text()) for path in in_tmp.iterdir()] == [("x.json", "before")]


def test_version(monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "--version") == (0, f"meshwright {__version__}\n", "")


def test_usage_errors_exit_2(monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "trian")[0] == 2
    assert run_main(monkeypatch, capsys, "train")[0] == 2


def test_config_errors_are_one_message_in_time_without_torch(in_tmp):
    # The real command, with a torch that cannot be imported.
    (in_tmp / "torch.py").write_text("raise SystemExit('torch was imported')")
    (in_tmp / "c.toml").write_text("[train]\nstepz = 1\n")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "c.toml"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=in_tmp,
    )
    assert time.monotonic() - began < 20  # 0.6 s where nothing else runs
    assert done.returncode == 2
    assert "c.toml:2: unknown key 'train.stepz' (did you mean 'steps'?)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "torch was imported" not in done.stderr + done.stdout
    assert not (in_tmp / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("schedule --stages 2 --micro-batches 3 --kind gpipe", 0),
        ("plan llama3-8b --cluster 8xh100-sxm --global-batch 64", 0),
        ("plan resnet-50 --cluster 4xv100-32gb --global-batch 256", 0),
        ("plan bert-large --cluster 4xv100-32gb --global-batch 128 --strategies", 0),
        ("plan deepseek-v3 --cluster 8xv100-32gb --global-batch 64", 3),  # nothing fits
        ("verify missing.toml --plan dp=2", 2),
        ("compare missing.toml --plans dp=2", 2),
    ],
)
def test_schedules_plans_and_configurations_that_are_missing_need_no_torch(words: str, code: int):
    program = (
        f"import sys; sys.argv = ['meshwright', *{words.split()!r}]\n"
        "from meshwright import cli\n"
        "try: cli.main()\n"
        "except SystemExit as left: sys.exit(99 if 'torch' in sys.modules else left.code)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() or code
    assert (code == 3) == ("GiB too much" in done.stderr)


def test_notes_come_before_the_run_and_its_code_is_ours(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(launcher, "run_training", lambda config, resume: asked.append(resume) or 75)
    code, _, err = run_main(monkeypatch, capsys, "train", str(EXAMPLE), "--plan", "dp=32")
    assert (code, asked) == (75, [False])
    assert run_main(monkeypatch, capsys, "train", str(EXAMPLE), "--resume")[0] == 75
    assert asked == [False, True]
    assert "warning: the plan 'dp=32' uses 32 devices" in err
