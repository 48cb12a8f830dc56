"""The same training in a loop of one's own: run by `python loop.py`, or by `torchrun --nproc-per-node 2 loop.py`."""

import os

import torch
from mine import build_model, loss_fn, make_data

import meshwright as mw


def train(plan="dp=2"):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    losses = []
    for _ in range(8):  # epochs
        for batch in mw.make_loader(make_data(), model, global_batch_size=64):  # this rank's share
            losses.append(model.step(batch).loss)  # the loss of the whole batch
    return losses, model.full_state_dict()


def main():
    losses, state = train() if "RANK" in os.environ else mw.launch(train, 2)[0]
    if os.environ.get("RANK", "0") == "0":
        first, last = sum(losses[:15]) / 15, sum(losses[-15:]) / 15
        print(
            f"{len(losses)} steps, mean loss of the first epoch {first:.3f}, of the last {last:.3f}; {len(state)} tensors"
        )


if __name__ == "__main__":
    main()
