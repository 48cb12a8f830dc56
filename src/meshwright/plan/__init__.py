"""Planning: from a description of the model and the cluster, or of another tool's configuration, to a Plan. Free of torch.

Nothing that applies or runs a plan imports this folder.

costs/          seconds and bytes of a step
search/         every legal mix, costed and ranked
catalogue/      known architectures
plan_table      what `meshwright plan` prints
strategy_table  every preset beside one device
deepspeed/      a DeepSpeed configuration as a plan

To add a reader of another tool's configuration, add a folder beside `deepspeed/`.
"""

__all__: list[str] = []
