"""Accelerate: run by `accelerate launch --num_processes 2 --cpu`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def make_data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def main():
    accelerator = Accelerator()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8, shuffle=True)  # of one rank
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    accelerator.print(f"loss {accelerator.reduce(loss, 'mean').item():.3f}")


if __name__ == "__main__":
    main()
