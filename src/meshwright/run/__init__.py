"""run: one correct step, whatever the plan.

parallel_model  apply_plan, and the model that it returns
assembly        module, engine and optimizer from what the user hands over
step            the step: micro-batches, weights, reduction, clipping, the optimizer
agreement       first exchange of a step: what the ranks bring
exchange        second exchange: losses, weights and failures
work            the work of a step as its engine sees it: losses, roots of backward, sums
losses/         losses with exact weights, and what a loss is a mean over
sentinels/      what ranks must have alike, compared while they train
result          what a step returns
accumulate      GradientAccumulation, for loops of the user's own
gate            refusal of loops that exchange nothing
autocast        autocast around a step
diagnose        origin of a NaN, and the error that names it
put_back        what a step puts back

To add a check of each step: a term in `agreement.py`, which all ranks add up anyway.
"""

__all__: list[str] = []
