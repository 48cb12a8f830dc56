"""ranks/processes.py: processes of a run import what this interpreter would, and nothing of the current directory."""

import subprocess
import sys

from meshwright.ranks.processes import python_command


def test_the_current_directory_is_not_on_the_path_and_ours_is(tmp_path, monkeypatch):
    here, modules = tmp_path / "here", tmp_path / "modules"
    for folder in (here, modules):
        folder.mkdir()
    for name in ("numpy", "json", "look"):
        (here / f"{name}.py").write_text("raise RuntimeError('run from the current directory')\n")
    (modules / "look.py").write_text("import json, sys, numpy\ndef main(): print(sys.argv[1:], numpy.__file__)\n")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry not in ("", ".")])
    command = python_command("look", "a", "b")
    ran = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("['a', 'b'] ")
    assert str(here) not in ran.stdout
