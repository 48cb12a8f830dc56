"""Losses as a sum and a weight, so that any cut of the batch gives one device's loss.

Trial forwards of the first batch find out what a mean is taken over; later batches are checked against that.

loss             Loss, and the reading of users' losses
weights          items that a mean counts: samples or labels
settle           decision on the first batch
trials           trial forwards that show what a loss is a mean over
trial_runs       trials run on one rank, or on all together
trial_writes     parameters that trials have written
pipeline_trials  trials run with all stages
terms            a micro-batch's loss as a term of the step's
watch            detection of losses that are no longer a mean

To recognise another kind of mean, touch `weights.py`, and add a trial in `trials.py`.
"""

__all__: list[str] = []
