"""Ownership of parameters and buffers: those of other stages leave the module and come back when it is whole again.

Every rank of a pipeline has built the whole model. From the cut on it holds its own stages' part.

holding        parameters removed from the module and restored
tied           parameters that several stages use
broadcasts     values of one rank, given to all
whole_buffers  buffers on every rank
settled        memory of buffers between two forwards
early_copies   copies of the model made before the cut

To share another kind of state, touch `broadcasts.py`.
"""

__all__: list[str] = []
