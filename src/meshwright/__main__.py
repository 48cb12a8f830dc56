"""Command `meshwright`, also as `python -m meshwright`."""

from __future__ import annotations

import sys

from meshwright.cli_plan import read_plain, show_plans

__all__: list[str] = []


def main() -> None:
    """Run the command line; typer loads where it has to read it."""
    plain = read_plain(sys.argv[1:])
    if plain is None:
        from meshwright import cli

        cli.main()
        return
    from meshwright.cli_errors import run_command

    run_command(lambda: show_plans(**plain))


if __name__ == "__main__":
    main()
