"""Building blocks of parity tests, for users too.

Ranks come from a pool that outlives a test, so a test of several ranks takes milliseconds.

assertions  assertions that two runs are equal
pool        ranks that tests share
counting    counts of exchanges

To add an assertion, touch `assertions.py`.
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
