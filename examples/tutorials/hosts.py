"""Several hosts: one script that torchrun, srun or Kubernetes start on each host, and that starts its own ranks without them."""

import functools
import os

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train():
    world = mw.join_world()  # under mw.launch it is joined already, and this returns it
    model = mw.apply_plan(build_model, f"dp={world.world_size}", loss_fn=loss_fn, optimizer=SGD)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(9, 8, generator=generator, dtype=torch.float64), torch.randint(3, (9,), generator=generator)
    share = mw.split_batch(batch, model)
    return world.rank, world.world_size, [model.step(share).loss for _ in range(3)]


def main():
    is_rank = "RANK" in os.environ or "SLURM_PROCID" in os.environ  # started by torchrun or Kubernetes, by srun
    rank, world_size, losses = train() if is_rank else mw.launch(train, 2)[0]
    if rank == 0:
        print(f"losses over {world_size} ranks:", *(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
