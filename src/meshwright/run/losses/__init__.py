"""Losses as a sum and a weight, so that any cut of the batch gives one device's loss.

loss         Loss, and how a loss is read
weights      what a mean counts: samples or labels
settle       the decision on the first batch
part_errors  errors for losses that parts do not give
told_evidence  what ranks tell one another of their trials
enough       samples of a share that trials take
trials       trial forwards that show what a loss is a mean over
trial_forward  one trial, after which all is as it was
trial_parts  parts of batches that trials take
widened      trials in float32 of what has fewer digits
proofs       trials of gradients, and of what code keeps for the next batch
own_slopes   code of the model's own in backward
trial_runs   trials run on one rank, or on all that a forward takes
trial_watch  what one trial's code reads and ignores
trial_writes parameters that trials have written to
drawn        losses of models that draw whenever they run
terms        a micro-batch's loss as a term of the step's
buffer_calls buffers that each micro-batch changes
moved_state  counts that a loss, a hook or a variable keeps
watch        losses that are a mean no longer
model_watch  models that begin to mix samples

To recognise another kind of mean, touch `weights.py`, and add a trial in `trials.py`.
"""

__all__: list[str] = []
