"""The mutations, with whose bugs they are counterparts of and the plans under which they show."""

from __future__ import annotations

import mutations as m
import mutations_of_ranks as r
from mutations import Mutation

CLIP = {"max_grad_norm": 0.05}
TTRACE, TRAINCHECK, ISSUE, OTHER = "TTrace", "TrainCheck", "Megatron-LM#7452", "-"


def _one(install: m.Callable[[m.Stack], None], anchor: str, title: str, plan: str, **options: m.Any) -> Mutation:
    return Mutation(install=install, anchor=anchor, title=title, plan=plan, **options)


CATALOGUE = [
    _one(m.embedding_without_mask, TTRACE, "wrong embedding mask", "tp=2"),
    _one(m.embedding_without_mask_later, TTRACE, "the same, on the real ranks alone", "tp=2"),
    _one(m.partial_gradients_not_summed, TTRACE, "LayerNorm and router gradients not summed over tp", "tp=2"),
    _one(m.partial_gradients_not_summed, TTRACE, "the same, with dp", "dp=2,tp=2"),
    _one(m.column_input_gradient_not_summed, TTRACE, "column's input gradient not summed", "tp=2"),
    _one(m.column_input_gradient_not_summed_later, TTRACE, "the same, on the real ranks alone", "tp=2"),
    _one(m.row_output_not_summed_later, OTHER, "row's output not summed, on the real ranks alone", "tp=2"),
    _one(m.sequence_gradient_not_scattered_later, TTRACE, "reduce-scatter keeps a term, real ranks alone", "tp=2"),
    _one(m.another_ranks_slice, OTHER, "a shard's rows in another order", "tp=2"),
    _one(m.one_shard_twice, OTHER, "two ranks hold one shard of a weight", "tp=2"),
    _one(m.shards_draw_one_mask, OTHER, "one dropout mask for all shards", "tp=2", model="dropout"),
    _one(m.shards_draw_one_mask_later, OTHER, "the same, on the real ranks alone", "tp=2", model="dropout"),
    _one(
        m.copies_draw_apart_later,
        OTHER,
        "dropout masks of copies differ, real ranks alone",
        "tp=2",
        model="dropout_between",
    ),
    _one(m.smoothing_over_own_classes, ISSUE, "label smoothing over a rank's classes", "tp=2", model="smoothed"),
    _one(m.loss_off_by_the_group_size, ISSUE, "vocabulary loss off by log(tp)", "tp=2"),
    _one(m.norm_of_own_shards, TRAINCHECK, "clipped by the norm of own shards (BLOOM-176B)", "tp=2", options=CLIP),
    _one(m.norm_counts_copies_twice, ISSUE, "copies counted twice in the norm", "tp=2", options=CLIP),
    _one(r.gradients_not_summed, TRAINCHECK, "gradients not summed (DDP out of sync)", "dp=2"),
    _one(r.gradients_of_one_tensor_not_summed, TRAINCHECK, "one tensor's gradient not summed", "dp=2"),
    _one(r.copies_not_made_equal, TRAINCHECK, "ranks start with other weights", "dp=2"),
    _one(r.sum_corrupted_on_one_rank, TRAINCHECK, "a faulty link, on one rank", "dp=2"),
    _one(r.sum_corrupted_on_all_ranks, TRAINCHECK, "a faulty sum, alike on all ranks", "dp=2"),
    _one(r.gradients_divided_again, TTRACE, "gradients divided by dp once more", "dp=2"),
    _one(r.gradients_summed_in_bfloat16, OTHER, "precision lost in the sum", "dp=2"),
    _one(r.mean_of_means, TTRACE, "loss scaled by local counts", "dp=2", samples=7),
    _one(r.accumulation_not_divided, TTRACE, "loss not divided by micro-batches", "dp=2,micro_batches=2"),
    _one(r.gradients_not_cleared, TRAINCHECK, "gradients of the step before stay", "dp=2"),
    _one(r.micro_batch_twice, OTHER, "one micro-batch twice, one never", "dp=2,micro_batches=2"),
    _one(r.buffers_not_synced, OTHER, "running statistics not synced", "dp=2", model="batch_norm"),
    _one(r.clip_by_own_norm, TRAINCHECK, "clipped by a local norm", "dp=2,zero=1", options=CLIP),
    _one(r.values_not_spread, TTRACE, "new values not gathered", "dp=2,zero=1"),
    _one(r.update_lost, TTRACE, "the update goes nowhere, on every rank", "dp=2,zero=1"),
    _one(r.stale_gather, TTRACE, "stale parameters after the update", "dp=2,zero=3,whole_below=0"),
    _one(r.segment_of_another_rank, OTHER, "gradients land at wrong places", "dp=2,zero=2"),
    _one(r.optimizer_skips_a_rank, TRAINCHECK, "one rank's optimizer does nothing", "dp=2"),
    _one(r.optimizer_skips_a_rank, TRAINCHECK, "the same, where it alone has the shard", "dp=2,zero=1"),
    _one(r.loss_told_wrong, OTHER, "ranks are told other losses", "dp=2"),
    _one(r.tied_gradients_not_summed, TTRACE, "embedding and head untied", "pp=2,micro_batches=2", model="tied"),
    _one(r.stale_activation, OTHER, "a stage gets an older micro-batch", "pp=2,micro_batches=2"),
    _one(r.boundary_gradient_lost, OTHER, "a boundary's gradient lost", "pp=2,micro_batches=2"),
    _one(r.micro_batch_twice, OTHER, "one micro-batch twice, one never", "pp=2,micro_batches=2"),
    _one(r.repeated_with_another_mask, TTRACE, "recompute draws another mask", "dp=2,recompute=full", model="dropout"),
    _one(r.repeated_on_another_input, TTRACE, "recompute on another input", "dp=2,recompute=full"),
    _one(
        r.autocast_left_out_on_a_rank,
        TRAINCHECK,
        "autocast left out on one rank",
        "dp=2,precision=bf16",
        model="single",
    ),
]
