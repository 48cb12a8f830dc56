"""Comparison of one training under several plans: times, bytes, memory and a conclusion.

Each plan runs in processes of its own, on the same cores and the same batches.

command        `meshwright compare`
run_plans      compare_plans: the plans, one after another
trial          one plan, as its ranks run it
rows           samples of one plan, and its row of numbers
comparison     rows, tables and JSON
conclusion     the numbers in words
formulas       spreads, speed-ups and Amdahl's law
refine         `meshwright plan` for a configuration
verify_config  `meshwright verify` for a configuration
run_report     `meshwright report`, and the report of a comparison

To add a column, touch `comparison.py`.
"""

__all__: list[str] = []
