"""Tensor parallelism: any module, cut where a proof shows that shards compute the same (ADR 0008; ADR 0012 for guards and types).

A search over the first batch proposes a layout; each rank then holds shards, and each call is guarded by what was proven.

search/            layouts proposed from a trace of the model
proof/             shards run beside the whole module and compared
types/             type of each tensor over the ranks, with a rule for each operation
guards/            conditions of a proof, checked at each call
tensor_layout      the layout, as a value
cutting            a layout applied to a module, and undone
roles              collectives at a region's edges
stored             parameters kept in parts, and put together for each call
placement          the ranks' shards compared with the parameter that was cut
part               ways to run a call of a part
region_state       a rank's state while a cut model runs
slices             a tensor in slices over ranks that acts as a whole one
whole              a part run as on one device, with gathered parameters
lost_writes        writes into parameters that are put together for one call, refused
sizes              sizes of the full model translated to the shard's
attention          nn.MultiheadAttention with some of its heads
masks              random states for dropout of shards and of copies
matrices           whole matrices for an optimizer that needs them
held_buffers       buffers of which each rank has a part
data_alias         `.data` of a tensor in slices
copied_attributes  attributes that a copy's forward leaves, shown on the model
inspection         a part run a second time as on one device, and compared
reasons            what a plan says of its layout
wishes             what a plan may wish of its layout, and models that cannot be followed
engine             the engine
expected_bytes     expected bytes of a step

To add a way of cutting, touch `search/candidates.py`, add a role in `roles.py`, and a rule in `types/` for new operations.
"""

__all__: list[str] = []
