"""Watching of a run from outside: in the terminal, and in a browser. Reads the run's folder, writes nothing, loads no torch.

follow   a run's folder, read as it grows
screen   the view in a terminal
serve    the report in a browser, live
watch_command what `meshwright watch` does

To show something else, add it to `follow.py`'s `WatchedRun`, then to `screen.py` and `live.html`.
"""

__all__: list[str] = []
