"""Samples: where they come from, in which order, and who reads them.

sources  data sources and held-out parts
order    which samples make up which batch (pure functions)
loader   make_loader: each rank's share of each batch
streams  iterable datasets and ready-made batches
fetch    reading at once, in a thread, or in workers

To add a source: `sources.py`.
"""

__all__: list[str] = []
