"""describe: modules and batches read without running them for real.

layers   layers of a module in the order in which they run
batches  forms of a batch, its samples counted, its shares

To accept another form of batch: `batches.py`.
"""

__all__: list[str] = []
