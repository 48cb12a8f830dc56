"""Memory: what a device has to hold under one plan after the other, and what the planner says where nothing fits."""

import meshwright as mw

MODEL = mw.ModelSpec.transformer(layers=32, hidden=4096, heads=32, vocab=32000, sequence=4096)
TRAINING = mw.TrainSpec(global_batch_size=64, precision="bf16")
PLANS = (
    "dp=8,micro_batches=8",
    "dp=8,zero=1,micro_batches=8",
    "dp=8,zero=2,micro_batches=8",
    "dp=8,zero=3,micro_batches=8",
    "dp=8,zero=3,micro_batches=8,recompute=selective",
    "dp=8,zero=3,micro_batches=8,recompute=full",
    "dp=8,zero=3,micro_batches=8,recompute=full,offload=optimizer",
    "dp=2,tp=4,zero=1,micro_batches=8",
)


def main():
    cluster = mw.load_cluster("8xh100-sxm")
    print(f"{MODEL.num_params / 1e9:.1f}B parameters, batch of 64 x 4096 tokens, 8 devices")
    for line in PLANS:
        costs = mw.predict_plan(MODEL, cluster, TRAINING, mw.Plan.parse(line + ",precision=bf16"))
        print(f"{costs.peak_bytes / 2**30:6.1f} GiB  {costs.step_s:5.2f} s a step  {line}")
    try:
        mw.make_plans(MODEL, mw.load_cluster("2xl4"), TRAINING)
    except mw.PlanError as error:
        print(f"\non 2 L4: {error}")


if __name__ == "__main__":
    main()
