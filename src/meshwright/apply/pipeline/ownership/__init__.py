"""Who holds what: parameters and buffers of other stages leave the module and come back.

holding        parameters taken out and put back
tied           parameters that several stages use
broadcasts     values of one rank given to all
whole_buffers  buffers on every rank
settled        memory of buffers between two forwards
shared_state   state outside of modules that stages would part over
early_copies   copies of the model that are older than the cut

To share another kind of state: `broadcasts.py`.
"""

__all__: list[str] = []
