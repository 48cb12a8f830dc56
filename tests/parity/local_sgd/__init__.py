"""Local SGD as an exercise: a strategy in one folder, for docs/adding_a_strategy.md. Tests alone use it.

engine          the engine
expected_bytes  bytes that a step should send
jobs            functions that ranks import, with the line that makes the engine
"""
