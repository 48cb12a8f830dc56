"""plan: from a description of the model and the cluster, or of DeepSpeed's configuration, to a Plan. Free of torch.

deepspeed/  a DeepSpeed configuration as a plan

To add a reader of another tool's configuration: a folder beside `deepspeed/`.
"""

__all__: list[str] = []
