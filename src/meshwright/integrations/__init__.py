"""Other people's training loops over models under plans, each an extra of its own; nothing of the package imports this room.

hf_trainer   transformers' Trainer under a plan
trainer_files  what it saves and loads
sealed       its checkpoints that are known to be whole
one_run      one run at a time in its folder
decisions    arguments, callbacks and metrics, by which all ranks go the same way
fabric       Lightning Fabric's strategy under a plan
taken_over   models that a later Trainer takes from an earlier one
planned      the model under a plan, as those loops see it
one_process  accelerate's state: one process that has the whole batch, and ranks that log and save once
refusals     arguments of transformers' Trainer that a plan replaces or cannot have
loss_parts   what the loss of a batch is of the losses of its parts, found on the first batch
share_streams  random numbers of ranks: alike for data, apart for shares of a batch
same_batches  comparison of the whole batches that ranks have loaded
optimizer_file  the optimizer's whole state as one device saves it

To add a loop, add a file beside `hf_trainer.py`; what several of them need stands in the others.
"""

__all__: list[str] = []
