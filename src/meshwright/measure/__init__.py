"""Measurement: whether a plan computes what one device computes, and what this machine can do.

`verify_plan` runs a plan beside an oracle, plain PyTorch without code of this package, and compares every parameter.

verify           verify_plan: plan and plain process side by side
oracle           plain PyTorch in one process, sharing no code with the package
plain_draws      random numbers of the oracle, by place
recording        steps under a plan, with the gradients that the optimizer saw
parity           differences of two sets of tensors, and the report
resolution       resolution of the model's own arithmetic
noise            whether roundings make a tiny difference
verdict          rows of two runs of the same steps, and the verdict on them
outputs          the first module whose output differs
probe            this machine as a cluster
probe_ranks      its measurements, on ranks
probe_exchanges  collectives and messages, by size and number of ranks
probe_far        kernels in more memory than the caches hold
probe_functions  elementwise functions that it times
probe_host       calls on next to nothing: operators, views, modules
probe_runtime    what plans add to a model's operators
host_pace        pace of this host, beside when it was measured
probe_cores      how much of the cores other programs took meanwhile
probe_sizes      sizes of what it measures
probe_listing    what `meshwright probe` prints

To compare something more, record it in `oracle.py` and in `recording.py`.
"""

__all__: list[str] = []
