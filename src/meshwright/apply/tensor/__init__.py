"""Tensor parallelism: any module, cut by proof (ADR 0008; ADR 0012 for guards, types and inspections).

search/            layouts proposed from a trace of the model
proof/             shards run beside the whole: equal, or not cut
types/             what each tensor of a part is on each rank, with a rule per operation
guards/            what a proof was made with, checked at each call
tensor_layout      the layout, as a value
cutting            a layout applied to a module, and undone
roles              collectives at a region's edges
part               the ways in which a call of a part runs
region_state       what a rank remembers while a cut model runs
slices             a tensor in slices over ranks that looks whole
whole              a part run as on one device, with gathered parameters
sizes              sizes of the full model translated to the shard's
attention          nn.MultiheadAttention with some of its heads
masks              random states for dropout of shards and of copies
matrices           whole matrices for an optimizer that needs them
partial            a gradient's terms, summed while backward runs
held_buffers       buffers of which each rank has a part
data_alias         `.data` of a tensor in slices
copied_attributes  attributes of a forward's copy shown on the model
inspection         a part run a second time as on one device, and compared
reasons            what a plan says of its layout
wishes             what a plan may wish of its layout, and models that cannot be followed
engine             the engine
expected_bytes     bytes that a step should send

To add a way of cutting: `search/candidates.py`, a role in `roles.py`, a rule in `types/` where its operations have none.
"""

__all__: list[str] = []
