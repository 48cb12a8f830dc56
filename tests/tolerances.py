"""The only place with tolerances. Each is relative to the largest entry of the reference's tensor.

They come from the design contract and are never relaxed without a decision record.
"""

FLOAT64 = (
    1e-11  # any plan against one plain process: loss, gradients before the optimizer, parameters after 3 SGD steps
)
CROSS_ENTROPY = 1e-12  # cross-entropy over a cut vocabulary against torch's own, in float64: losses and gradients
FLOAT32 = 1e-5  # AdamW, 10 steps: loss, gradients
BFLOAT16_TREND = 0.05  # bf16 changes numbers: the loss after 10 steps against the one in float32
MIXED = 1e-2  # models with bfloat16 parameters: one rounding of their 8 bits, sums taken in another order
