"""Lightning Fabric: run by `python`."""

import lightning_fabric
import torch
import torch.nn.functional as F
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def make_data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def main():
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(make_data(), batch_size=8, shuffle=True))
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    loss = fabric.all_reduce(loss, reduce_op="mean")
    fabric.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
