"""`meshwright plan`: options that would be ignored, or that are missing."""

import pytest
from tests.unit.test_cli import EXAMPLE, run_main


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("bert-base", "--cluster", "8xh100-sxm"), "--global-batch"),
        (("bert-base", "--global-batch", "8"), "--cluster"),
        (("bert-base", "--cluster", "8xh100-sxm", "--global-batch", "8", "--refine", "2"), "--refine"),
        (("bert-base", "--cluster", "8xh100-sxm", "--global-batch", "8", "--devices", "2"), "--devices"),
        ((str(EXAMPLE), "--global-batch", "8"), "--global-batch"),
        ((str(EXAMPLE), "--precision", "bf16"), "--precision"),
        ((str(EXAMPLE), "--cluster", "8xh100-sxm", "--refine", "2"), "--refine"),
    ],
)
def test_an_option_of_plan_that_would_be_ignored_or_is_missing_is_refused(monkeypatch, capsys, arguments, option):
    code, out, err = run_main(monkeypatch, capsys, "plan", *arguments)
    assert code == 2
    assert out == ""
    assert f"Invalid value for {option}" in err
