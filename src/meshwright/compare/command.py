"""`meshwright compare`: the plans of a command line, and the table on the standard output. Free of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.compare.comparison import Comparison
from meshwright.compare.run_plans import Runs
from meshwright.errors import ConfigError, StorageError, exit_code_of
from meshwright.ranks.environment import read_place
from meshwright.texts import clean
from meshwright.train.config.load import load_config
from meshwright.train.failures import one_line
from meshwright.train.progress import ProgressView

__all__: list[str] = []


def run_comparison(
    config_path: str | Path,
    plans_text: str,
    overrides: Sequence[str] = (),
    json_path: str | Path | None = None,
    steps: int | None = None,
    *,
    report_path: Path | None = None,
) -> int:
    """Compare plans and show the table on the standard output, progress on the standard error.

    Args:
        config_path: The TOML file.
        plans_text: The plans, with ";" between them.
        overrides: "section.key=value", each replacing what the file says.
        json_path: Write the raw samples and the table's numbers there.
        steps: Measured steps of each plan; None: see `compare_plans` [count].
        report_path: Write a report, one HTML file, there.

    Returns:
        The exit code: 0, or that of the first plan that failed.

    Raises:
        ConfigError: The configuration or a plan is wrong, or this process is one of a job's ranks.
        StorageError: The JSON file or the report cannot be written.
    """
    if json_path is not None and not Path(json_path).absolute().parent.is_dir():
        raise ConfigError(f"--json {json_path}: there is no folder {Path(json_path).absolute().parent}")
    if report_path is not None and not report_path.absolute().parent.is_dir():
        raise ConfigError(f"--report {report_path}: there is no folder {report_path.absolute().parent}")
    place = read_place(os.environ)
    if place.world_size > 1:
        raise ConfigError(
            f"meshwright compare starts the ranks of each plan itself, and {place.source} has started {place.world_size}",
            fix=f"run meshwright compare without {place.source}, on one host",
        )
    config = load_config(config_path, overrides)
    with ProgressView(sys.stderr) as progress:
        comparison, errors = Runs(config, split_plans(plans_text), steps, progress).compare()
    show(comparison)
    for error in errors:
        _show_traceback(error)
    if json_path is not None:
        try:
            Path(json_path).write_text(comparison.to_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"the comparison could not be written to {json_path}: {error.strerror}") from error
    if report_path is not None:
        from meshwright.compare.run_report import compared_plans
        from meshwright.report.page import render, write_page

        write_page(render([], compared=compared_plans(comparison)), report_path)
    return exit_code_of(errors[0]) if errors else 0


def split_plans(text: str) -> list[str]:
    """Return the plans of a text that has ";" between them.

    >>> split_plans("single; dp=2,micro_batches=2;")
    ['single', 'dp=2,micro_batches=2']
    """
    return [part.strip() for part in text.split(";") if part.strip()]


def show(comparison: Comparison) -> None:
    """Write a comparison to the standard output: framed on a terminal that is wide enough, plain text elsewhere."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    widest = max(sum(max(map(len, column)) + 3 for column in zip(*cells, strict=True)) for cells in comparison.tables())
    if not console.is_terminal or widest + 1 > console.width:
        sys.stdout.write(f"{comparison}\n")
        return
    console.print(f"[bold]{escape(comparison.title)}[/bold]")
    for head, *lines in comparison.tables():
        table = Table()
        for name in head:
            table.add_column(name, justify="left" if name in ("plan", "runs as") else "right", no_wrap=True)
        for line in lines:
            table.add_row(*(escape(cell) for cell in line))
        console.print(table)
    console.print(f"[dim]{escape(chr(10).join(comparison.legend()))}[/dim]\n")
    console.print(escape(comparison.conclusion))


def _show_traceback(error: Exception) -> None:
    """Write the traceback of user code to the standard error; our own errors are one line in the table's conclusion."""
    trace = getattr(error, "traceback_text", "") or "\n".join(getattr(error, "__notes__", ()))
    if trace:
        sys.stderr.write(clean(f"{one_line(error)}\n{trace}".rstrip()) + "\n")
