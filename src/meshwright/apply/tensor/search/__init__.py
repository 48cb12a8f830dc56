"""The search for a layout: model and first batch in, regions out. What is not proven stays whole, with the reason.

trace       one forward of the plain model: which operation feeds which
operations  torch functions by what they do with a parameter
pairs       pairs of products that might be cut
candidates  the ways of cutting a pair, in the order of trial
regions     candidates tried one after the other until one is proven
sequences   layers that run on slices of the sequence
search      the whole of it

To add a kind of pair: `pairs.py`; to add a way of cutting one: `candidates.py`.
"""

__all__: list[str] = []
