"""Building of a model that a rank will hold only a part of: in pages of a file, which a process need not keep in memory.

A rank runs the user's own code, which gives one device's numbers. What it makes stays in a file until the plan has cut it.

pages           memory in a file: pages that are in use lie in memory, the others on disk
paged_build     building a model there, and bringing what the rank keeps into memory
pretrained      weights of a Hugging Face directory, read into a model in pieces

Why: docs/adr/0017-building-in-pages.md.

To read weights from another kind of directory, touch `pretrained.py`.
"""

__all__: list[str] = []
