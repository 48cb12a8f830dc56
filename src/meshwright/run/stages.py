"""Micro-batches of one step run through the stages of this rank; a failure of one is told to all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.apply.pipeline.executor import ScheduleExecutor
from meshwright.apply.pipeline.walking.unit_hooks import refuse_functional_call
from meshwright.errors import LostPeerError
from meshwright.run.exchange import SumExchange
from meshwright.run.losses.loss import LossTerm

__all__: list[str] = []


def run_schedule(
    engine: PipelineEngine,
    num_micro_batches: int,
    term_of: Callable[[nn.Module, int], LossTerm | None],
    root_of: Callable[[LossTerm], tuple[Tensor, Tensor | None] | None],
) -> list[LossTerm]:
    """Run a step's forwards and backwards, and return the losses that this rank's stages compute.

    Args:
        engine: The pipeline.
        num_micro_batches: Micro-batches, which every rank of the pipeline has [count].
        term_of: (module, which micro-batch) -> its loss.
        root_of: Loss -> what backward is run from and the gradient there; None where nothing is to be trained.

    Raises:
        Exception: This rank's own exception, or an ApplyError that names the rank whose code raised; on every rank.
    """
    try:
        return ScheduleExecutor(engine, num_micro_batches, term_of, root_of).run()
    except LostPeerError:
        raise
    except Exception as raised:
        error = refuse_functional_call(raised)
        engine.tell_failure(num_micro_batches)
        SumExchange(engine.loss_group, engine.device, [], failure=error).wait()
        if error is not raised:
            raise error from raised
        raise
