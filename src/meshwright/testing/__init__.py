"""Tools to test your own models under any plan: ranks that stay alive between tests, a plain reference, and parity checks.

from meshwright import testing

reference = testing.oracle_steps(build_model, [batch], loss_fn, optimizer=sgd)
per_rank = testing.run_ranks(testing.plan_steps, 2, build_model, plan, [batch], loss_fn)
for records in per_rank:
testing.assert_parity(records, reference)
"""

from meshwright.measure.oracle import StepRecord, oracle_steps
from meshwright.measure.recording import StepOptions, plan_steps
from meshwright.testing.assertions import assert_parity
from meshwright.testing.counting import CollectiveCounts, count_collectives
from meshwright.testing.pool import RankOutcome, close_pools, pool_pids, run_outcomes, run_ranks

__all__ = [
    "CollectiveCounts",
    "RankOutcome",
    "StepOptions",
    "StepRecord",
    "assert_parity",
    "close_pools",
    "count_collectives",
    "oracle_steps",
    "plan_steps",
    "pool_pids",
    "run_outcomes",
    "run_ranks",
]
