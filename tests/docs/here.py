"""`meshwright` in this process: what its entry point does, without an interpreter that imports everything anew."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from meshwright import cli


def run_here(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Run `meshwright WORDS` in a folder; return its exit code, standard output and standard error.

    Ranks that it starts are forked from the test pool's templates, one thread each. What ranks print
    themselves is not in the output.
    """
    out, err, code = io.StringIO(), io.StringIO(), None
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["meshwright", *words])
        patch.setenv("OMP_NUM_THREADS", "1")  # of the templates
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
    assert code is None or isinstance(code, int)
    return code or 0, out.getvalue(), err.getvalue()
