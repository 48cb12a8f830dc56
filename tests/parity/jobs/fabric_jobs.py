"""A script of Lightning Fabric on a plain module: in one process by Fabric alone, or under a plan."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

Found = dict[str, Any]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)).double()


def rows() -> torch.utils.data.TensorDataset:
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x[:, :3].cumsum(1))


def run(plan: str | None, path: str | None = None) -> Found:
    """Train with accumulation over two batches, of 4, 4, 4 and 1 rows; return losses of all rows, norms and weights."""
    from lightning_fabric import Fabric

    options: dict[str, Any] = {}
    if plan is not None:
        from meshwright.integrations.fabric import PlanStrategy

        options["strategy"] = PlanStrategy(plan)
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    module = build()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=4))
    found: Found = {"losses": [], "norms": []}
    for epoch in range(2):
        del epoch
        for number, (x, y) in enumerate(loader):
            loss: Tensor = (model(x) - y).square().mean() if len(x) else model(x).sum() * 0
            more = {} if plan is None else {"weight": float(len(x))}
            fabric.backward(loss, **more)
            if number % 2:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                found["norms"].append(float(norm))
                fabric.clip_gradients(model, optimizer, clip_val=0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x, y = rows().tensors
            found["losses"].append((model(x) - y).square().mean().item())
    if path is not None:
        fabric.save(path, {"model": model})
        fabric.load(path, {"model": model})
    found["state"] = module.state_dict() if plan is None else fabric.strategy.parallel.full_state_dict()
    found["writes"] = fabric.is_global_zero
    return found


def without_weight(plan: str) -> None:
    from lightning_fabric import Fabric

    from meshwright.integrations.fabric import PlanStrategy

    fabric = Fabric(accelerator="cpu", devices=1, strategy=PlanStrategy(plan))
    module = build()
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, _ = mw.split_batch(rows().tensors, fabric.strategy.parallel)
    fabric.backward(model(x).sum())


def shuffled(plan: str | None, kind: str = "drawn") -> Found:
    """Train on shuffled rows; return the losses, and the first number of each row that this rank was given, by epoch."""
    from lightning_fabric import Fabric

    options: dict[str, Any] = {}
    if plan is not None:
        from meshwright.integrations.fabric import PlanStrategy

        options["strategy"] = PlanStrategy(plan)
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    module = nn.Sequential(build(), nn.Dropout(0.5 if kind == "dropout" else 0.0))
    torch.manual_seed(3 + (fabric.global_rank if kind == "apart" else 0))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=4, shuffle=True))
    found: Found = {"losses": [], "rows": [], "drawn": []}
    for _ in range(2):
        found["rows"].append([])
        for x, y in loader:
            found["rows"][-1] += x[:, 0].tolist()
            outputs = model(x)
            found["drawn"].append(outputs.eq(0.0).tolist())
            loss: Tensor = (outputs - y).square().mean() if len(x) else outputs.sum() * 0
            fabric.backward(loss, **({} if plan is None else {"weight": float(len(x))}))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            x, y = rows().tensors
            found["losses"].append((model(x) - y).square().mean().item())
    return found


def gathered_unevenly(plan: str) -> None:
    """Gather one more row on each later rank."""
    from lightning_fabric import Fabric

    from meshwright.integrations.fabric import PlanStrategy

    fabric = Fabric(accelerator="cpu", devices=1, strategy=PlanStrategy(plan))
    module = build()
    fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.all_gather(torch.ones(1 + fabric.global_rank, 2))


def reduced(plan: str, way: str) -> float:
    """Return the mean over a batch of three rows: of shares' means, by the fix of its refusal, or of what ranks have alike."""
    from lightning_fabric import Fabric

    from meshwright.integrations.fabric import PlanStrategy

    fabric = Fabric(accelerator="cpu", devices=1, strategy=PlanStrategy(plan))
    module = build()
    fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=3))
    x, _ = next(iter(loader))
    n = torch.tensor(float(len(x)))
    if way == "mean":
        return float(fabric.all_reduce(x[:, 0].mean(), reduce_op="mean"))
    found = fabric.all_reduce(x[:, 0].mean() * n, reduce_op="sum") / fabric.all_reduce(n, reduce_op="sum")
    return float(fabric.all_reduce(found, reduce_op="mean"))


def adversarial(plan: str | None, path: str) -> Found:
    """Train a generator and a critic by one Fabric; save one with an optimizer before they are set up, and both after."""
    from lightning_fabric import Fabric

    options: dict[str, Any] = {}
    if plan is not None:
        from meshwright.integrations.fabric import PlanStrategy

        options["strategy"] = PlanStrategy(plan)
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    modules = [build(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()]
    # Neither is under the plan yet: their states are their own.
    fabric.save(f"{path}/before", {"model": modules[0], "optimizer": torch.optim.SGD(modules[0].parameters(), lr=0.1)})
    maker, critic = (fabric.setup(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in modules)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=6, drop_last=True))
    softplus, norms = nn.functional.softplus, []
    for x, y in loader:
        more = {} if plan is None else {"weight": float(len(x))}
        fake = maker[0](x)
        fabric.backward(softplus(-critic[0](y)).mean() + softplus(critic[0](fake.detach())).mean(), **more)
        norms.append(float(fabric.clip_gradients(*critic, max_norm=0.1)))
        critic[1].step()
        critic[1].zero_grad()
        maker[1].zero_grad()
        fabric.backward(softplus(-critic[0](fake)).mean(), **more)
        norms.append(float(fabric.clip_gradients(*maker, max_norm=0.1)))
        maker[1].step()
        critic[1].zero_grad()
    if plan not in (None, "dp=2"):
        with pytest.raises(mw.ConfigError, match="ranks have parts"):
            fabric.save(f"{path}/parts", {"optimizer": maker[1]})
    fabric.save(f"{path}/after", {"maker": maker[0], "critic": critic[0]})
    fabric.barrier()
    state = torch.load(f"{path}/after")
    found = {f"{kind}.{name}": value for kind in ("maker", "critic") for name, value in state[kind].items()}
    fabric.load(f"{path}/before", {"model": maker[0]})
    whole = modules[0].state_dict() if plan is None else fabric.strategy.parallel.full_state_dict()
    return {"norms": norms, "state": found | {f"loaded.{name}": value.clone() for name, value in whole.items()}}


def saved_in_vain(plan: str, folder: str) -> Found:
    """Save where a file stands in place of a folder, then train on; return the error and a loss."""
    from lightning_fabric import Fabric

    from meshwright.integrations.fabric import PlanStrategy

    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=PlanStrategy(plan))
    module = build()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    found: Found = {}
    try:
        fabric.save(folder + "/file/model.ckpt", {"model": model})
    except mw.MeshwrightError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    x, y = mw.split_batch(rows().tensors, fabric.strategy.parallel)
    loss = (model(x) - y).square().mean()
    fabric.backward(loss, weight=float(len(x)))
    optimizer.step()
    return found | {"state": fabric.strategy.parallel.full_state_dict()}
