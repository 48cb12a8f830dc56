"""Samples: their sources, their order, and their loading.

The order depends on seed and epoch alone, so a run can continue under another plan with the same samples.

sources   data sources and held-out parts
order     samples of each batch (pure functions)
loader    make_loader: each rank's share of each batch
streams   iterable datasets and ready-made batches
position  checks of a loader's state
fetch     reading at once, in a thread, or in workers

To add a source, touch `sources.py`.
"""

__all__: list[str] = []
