"""Costs of a plan: seconds and bytes of a step, worked out from the model's operators and the cluster. Free of torch.

setup               degrees, batch and numerics of a step
machine             seconds of kernels and collectives
protocols           what a collective's steps wait for
layer_times         one layer on one rank
layers_cost         all layers, by their kinds
stages              balanced cuts, and time of schedules
stages_on_ranks     the ranks that run the stages of a setup
stage_bytes         what stages send
data_parallel_cost  what data parallelism and ZeRO add
rank_memory         bytes of a rank at its peak
runtime_cost        what this project's own runtime adds
step_cost           the numbers of a step, and of its passes
step_costs          the whole step

To add a strategy, touch `step_costs.py` and `rank_memory.py`.
"""

__all__: list[str] = []
