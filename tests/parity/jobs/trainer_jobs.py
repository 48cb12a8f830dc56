"""Runs of transformers' Trainer on a tiny GPT-2 and on a plain module, in one process by transformers alone, or under a plan."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import meshwright as mw

SAMPLES = 13
BATCH = 3
Found = dict[str, Any]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, [12] each; labels of some positions are ignored, more of them in later rows."""

    def __init__(self, num_rows: int = SAMPLES) -> None:
        draws = torch.Generator().manual_seed(0)
        self.ids = torch.randint(31, (num_rows, 12), generator=draws)
        self.labels = self.ids.clone()
        for row in range(num_rows):
            self.labels[row, 3 + (row * 5) % 9 :] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Inputs of 6 numbers, and what is to be learned from them."""

    def __init__(self, num_rows: int = SAMPLES) -> None:
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_rows, 6, generator=draws, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index, :3].cumsum(0)}


class Classes(Points):
    """The same points with classes; those of some rows of the later batches are ignored."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": torch.tensor(-100 if index in (4, 7, 9) else index % 3)}


class Noisy(Points):
    """The same points, moved by what three generators draw where they are loaded: in workers."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        moved = torch.randn(6, dtype=torch.float64) + random.random() + np.random.rand()
        return {**row, "x": row["x"] + 0.1 * moved}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """The same points, without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        points = Points()
        yield from (points[index] for index in range(len(points)))


class Regression(nn.Module):
    """Two products, and a mean over the samples; it takes no count of items."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        return {"logits": y} if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


class Contrast(Regression):
    """A loss that compares samples with each other."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        return {"loss": torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(y))), "logits": y}


class Classifier(Regression):
    """A mean over samples, of which ignored ones add nothing and count."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        if labels is None:
            return {"logits": y}
        return {"loss": nn.functional.cross_entropy(y, labels, reduction="none").mean(), "logits": y}


class Targets(Classes):
    """The same classes by a name that says nothing of labels."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {"x": row["x"], "target": row["labels"]}


class Hidden(Regression):
    """A mean over the samples that are not ignored, by labels of another name: a mean over samples in the first batch."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = self.down(torch.tanh(self.up(x)))
        return {"logits": y} if target is None else {"loss": nn.functional.cross_entropy(y, target), "logits": y}


class Balance(Regression):
    """A loss with a term over the whole batch, in training alone."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(nn.functional.dropout(x, 0.1, self.training), labels)
        if self.training and "loss" in outputs:
            outputs["loss"] = outputs["loss"] + outputs["logits"].softmax(-1).mean(0).square().sum()
        return outputs


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("regression", "stream", "noisy"):
        return Regression().double()
    if kind == "contrast":
        return Contrast().double()
    if kind in ("classes", "popped"):
        return Classifier().double()
    if kind == "hidden":
        return Hidden().double()
    if kind == "balance":
        return Balance().double()
    if kind == "norm":
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    rate = 0.1 if kind == "dropout" else 0.0
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def arguments(directory: str, **changes: Any) -> transformers.TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": directory,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**{**options, **changes})


def run(kind: str, plan: str | None, directory: str | None = None, resume: str | None = None, **changes: Any) -> Found:
    """Train; return each forward's loss, the logs, the weights and predictions. `plan` None is transformers' own Trainer."""
    from meshwright.integrations.hf_trainer import Trainer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    base: Any = transformers.Trainer if plan is None else Trainer
    losses: list[float] = []

    class Told(base):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, *args: Any) -> Any:
            if kind == "grouped":  # draws from torch's own generator in each epoch
                return transformers.trainer_pt_utils.LengthGroupedSampler(2 * BATCH, lengths=list(range(SAMPLES)))
            in_order = kind in ("classes", "popped", "hidden")
            return torch.utils.data.SequentialSampler(data) if in_order else super()._get_train_sampler(*args)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kind != "popped":
                return super().compute_loss(model, inputs, *args, **kwargs)
            labels = inputs.pop("labels")  # as in the documentation of transformers
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs["logits"], labels)
            return (loss, outputs) if kwargs.get("return_outputs") else loss

    data: Any = (
        Points() if kind in ("regression", "contrast", "balance", "norm") else Stream() if kind == "stream" else Rows()
    )
    data = Classes() if kind in ("classes", "popped") else Targets() if kind == "hidden" else data
    data = Noisy() if kind == "noisy" else data
    changes = {"max_steps": 4, **changes} if kind == "stream" else changes
    with tempfile.TemporaryDirectory() as place:
        more: dict[str, Any] = {} if plan is None else {"plan": plan}
        if kind in ("tokens", "grouped", "dropout"):
            more["compute_loss_func"] = sum_of_tokens
        trainer = Told(
            build(kind), arguments(directory or place, **changes), train_dataset=data, eval_dataset=data, **more
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
        predicted = trainer.predict(data).predictions
        parallel = None if plan is None else trainer.parallel
        state = trainer.model.state_dict() if parallel is None else parallel.full_state_dict()
        logs = [
            {key: value for key, value in log.items() if "runtime" not in key and "second" not in key}
            for log in trainer.state.log_history
        ]
        if parallel is not None:
            parallel.close()
    state = {name: value.clone() for name, value in state.items()}
    return {"losses": losses, "logs": logs, "state": state, "predicted": torch.as_tensor(predicted)}


def sum_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of next tokens in the model's own dtype; transformers' own casts to float32."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def under_plan(kind: str, plan: str, directory: str | None, resume: str | None, changes: dict[str, Any]) -> Found:
    return run(kind, plan, directory, resume, **changes)


def who_logs(plan: str) -> tuple[bool, bool, bool]:
    """Return whether this rank logs and saves, and whether transformers takes it for one of several."""
    from meshwright.integrations.hf_trainer import Trainer

    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(build("regression"), arguments(place, eval_strategy="no"), plan=plan)
        return trainer.is_world_process_zero(), trainer.args.should_save, trainer.args.world_size > 1


def other_batches(plan: str) -> None:
    """Train where each rank has rows of its own."""
    import meshwright as mw
    from meshwright.integrations.hf_trainer import Trainer

    data = Points()
    data.x = data.x + mw.join_world().rank
    with tempfile.TemporaryDirectory() as place:
        Trainer(build("regression"), arguments(place, eval_strategy="no"), train_dataset=data, plan=plan).train()


def one_after_another(plan: str | None, directory: str) -> dict[str, Any]:
    """Train two steps by one Trainer, which stays, and all steps from its checkpoint on by a second one of the same model."""
    from meshwright.integrations.hf_trainer import Trainer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    base: Any = transformers.Trainer if plan is None else functools.partial(Trainer, plan=plan)
    model, data = build("tokens"), Rows()
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    first = base(
        model, arguments(directory, max_steps=2, **changes), train_dataset=data, compute_loss_func=sum_of_tokens
    )
    first.train()
    whole = {name: value.clone() for name, value in model.state_dict().items()} if plan is None else {}
    second = base(
        model, arguments(directory, max_steps=4, **changes), train_dataset=data, compute_loss_func=sum_of_tokens
    )
    between = {name: value.clone() for name, value in model.state_dict().items()}
    assert plan is not None or all(torch.equal(between[name], value) for name, value in whole.items())
    second.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
    state = model.state_dict() if plan is None else second.parallel.full_state_dict()
    refused = ""
    if plan is not None:
        try:
            first.train()
        except mw.ConfigError as error:
            refused = error.message
    return {"between": between, "state": {name: value.clone() for name, value in state.items()}, "refused": refused}
