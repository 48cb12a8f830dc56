"""measure: is a plan equal to one device?

verify      verify_plan: plan and plain process side by side
oracle      plain PyTorch in one process, sharing no code with the package
recording   steps under a plan, with what the optimizer saw
parity      differences of two sets of tensors, and the report
resolution  what the model's own arithmetic resolves
outputs     the first module whose output differs

To compare something more: record it in `oracle.py` and in `recording.py`.
"""

__all__: list[str] = []
