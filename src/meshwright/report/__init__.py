"""Reports: runs and comparisons as one HTML file that needs no network. Free of torch.

run_files   a run's folder, read with suspicion
figures     curves as data, down-sampled for drawing, with exact statistics
plan_view   the plan as tables: layers x ranks
pictures    the mesh and bars, as positions for SVG
cost_terms  prediction beside measurement
trace_read  trace.json, read with suspicion
step_times  where the time of a traced step goes
step_picture a lane for each rank, and the simulated schedule
page        the HTML: rendered, escaped, written
vendor/     the plotting library that the page embeds, with its licence (ADR 0020)

To add a figure, touch `figures.py`; to add a section, `page.py` and `page.html`.
"""

__all__: list[str] = []
