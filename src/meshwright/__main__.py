"""`python -m meshwright` is the command `meshwright`."""

from __future__ import annotations

from meshwright.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
