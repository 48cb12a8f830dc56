"""Plans and predictions for a configuration on this machine. Imports torch in ranks alone.

config_model    the configuration's model as a ModelSpec, made by a rank
this_machine    clusters of this host: measured once, kept between runs
predictor       what plans of a configuration should cost here, and the best of them
measured        plans that were run here: what their steps took, kept between runs
messages        what stages and compressed gradients send, by what the runtime will do
choosing        the plan of a run that says "auto"
held_against    a prediction beside what was measured, in a line

To predict something new of a step, touch `plan/costs`.
"""

__all__: list[str] = []
