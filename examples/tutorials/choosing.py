"""Choosing a strategy: plans for a model and a cluster, ranked by predicted time, with memory and reasons. No GPU, no torch."""

import meshwright as mw


def main():
    model = mw.ModelSpec.transformer(layers=32, hidden=4096, heads=32, vocab=32000, sequence=4096)
    cluster = mw.load_cluster("8xh100-sxm")
    training = mw.TrainSpec(global_batch_size=64, precision="bf16")
    print(f"{model.num_params / 1e9:.1f}B parameters on {cluster.num_devices} devices")
    for plan in mw.make_plans(model, cluster, training, top=3):
        costs = plan.prediction
        print(f"\n{plan}: {costs.step_s:.2f} s a step, {costs.peak_bytes / 2**30:.0f} GiB a device")
        for reason in plan.reasons:
            print(" ", reason)
    print("\nthree numbers are enough:", mw.select_strategy("7B", batch_size=256, num_devices=8))


if __name__ == "__main__":
    main()
