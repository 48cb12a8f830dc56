"""Search: every legal mix of strategies for a model and a cluster, costed and ranked. Free of torch.

space        the mixes, and the rules that leave some out
candidate    one mix with its cost
mixes        mixes whose memory is known and whose time is not yet, and the fastest of those that were costed
ranking      the search, and the refusal where no plan fits
select       the strategy for a model's size, a batch and a number of devices
explanation  why a plan, and what would have to change for a faster one, in words

To add a rule, add a function to `space.RULES`.
"""

__all__: list[str] = []
