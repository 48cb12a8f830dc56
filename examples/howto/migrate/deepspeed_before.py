"""DeepSpeed: run by `deepspeed --num_gpus 2`."""

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def make_data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def main():
    model = build_model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=make_data(), config=CONFIG
    )
    for _ in range(5):
        for inputs, targets in loader:
            loss = F.cross_entropy(engine(inputs.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
    if engine.global_rank == 0:
        print(f"loss {loss.item():.3f}")  # of this rank's samples


if __name__ == "__main__":
    main()
