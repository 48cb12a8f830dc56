"""Description of modules and batches, read without running them for real.

Planning and the one-process modes use it; it never changes the model.

layers   layers of a module in the order in which they run
batches  forms of a batch, counts of its samples, its shares

To accept another form of batch, touch `batches.py`.
"""

__all__: list[str] = []
