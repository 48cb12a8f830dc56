"""One correct step, whatever the plan: micro-batches, exact weights, checks between ranks, the optimizer.

`apply_plan` makes a `ParallelModel` here; its `step` is the only place where a rank's gradients and decisions meet the others'.

applying        apply_plan: a user's model laid over devices
parallel_model  the model that it returns
uncopied        refusal of its copies and pickles
options         checks of what a script passes
assembly        module, engine and optimizer from the user's arguments
building/       models built in pages of a file, pretrained weights
step            the step: micro-batches, weights, reduction, clipping, the optimizer
first_batch     what comes before the first step: trials, and the strategy's look at the model
joined_shares   shares of dp ranks and a pipeline's micro-batches joined to whole batches, where parts do not do
share_forms     forms of shares, which ranks compare before they join them
agreement       first exchange of a step: counts, flags and sayings of all ranks
exchange        second exchange: losses, weights and failures
work            the work of a step as its engine sees it: losses, roots of backward, sums
losses/         losses with exact weights, and what a loss is a mean over
sentinels/      comparison of what ranks must have alike, during training
checkpoints/    save_checkpoint and load_checkpoint
result          result of a step
step_trace      trace of some steps, of all ranks on one clock
profiled_operators  operators of traced steps by torch.profiler, on the rank's clock
accumulate      GradientAccumulation, for users' own loops
optimizer_draws  random numbers of an optimizer, alike on all ranks
global_draws    random numbers of forwards that do not depend on the layout
draw_trials     trials by which they are found
trial_draws     the draws of one trial forward
draw_orders     orders of samples that they try
draw_owners     samples that drawn elements have influence on
draws_of_torch  models that leave their draws to torch's generators
draws_found     what the trials have shown on one rank
draw_slopes     gradients of a batch beside those of its parts
draw_texts      texts for people about draws
draw_parts      outputs of a batch beside those of its parts
draws_of_work   random numbers of one step
gate            refusal of optimizer steps that nothing was exchanged for
model_backwards    refusal of backwards that a model's own code runs into its parameters
model_collectives  refusal of collectives that a model's own code calls
arrivals        refusal of gradients that nothing would exchange
own_draws       random numbers of forwards that an own loop calls
own_loop        forward, backward and optimizer as calls of a user's own loop
own_backward    comparison of such a backward between the ranks
gradient_scales    factors by which a script has multiplied gradients that ranks hold in pieces
written_gradients  gradients that a script has written since such a backward
gather_batch    rows of all ranks of a batch, with gradients
loss_graph      which models and parameters a loss comes from
autocast        autocast around a step
diagnose        origin of a NaN, and the error that names it
put_back        what a step puts back
structure       modules that the first forward replaces

To add a check of each step, add a term in `agreement.py`, which all ranks sum anyway.
"""

__all__: list[str] = []
