"""Models and losses that count other things than samples, or cannot be cut; functions that ranks import."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.models import small_models as models
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing
from meshwright.measure.verify import turn_off_dropout

VOCABULARY = 37
ROWS = (12, 11, 3, 2)
"""Labels that count in each row of the batch: parts of it have unequal numbers."""


# -- Hugging Face's models with their own loss, float32 inside ------------------------------------------------------------

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def _bart(hf: Any) -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        is_decoder=True,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return hf.BartForCausalLM(config)


def _t5(hf: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = hf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    return hf.T5ForConditionalGeneration(config)


def _llava(hf: Any) -> nn.Module:
    vision = hf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2
    )
    text = hf.LlamaConfig(**_SIZES, use_cache=False)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1, image_seq_length=4
    )
    return hf.LlavaForConditionalGeneration(config)


def _gpt2(hf: Any) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config)


class Wrapped(nn.Module):
    """A user's module around a model of Hugging Face's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=ids, labels=labels)


class RowMean(nn.Module):
    """A mean over samples of each one's mean over its own labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        each = F.cross_entropy(self.head(self.table(input_ids)).transpose(1, 2), labels, reduction="none")
        valid = labels != -100
        return types.SimpleNamespace(loss=(each.sum(1) / valid.sum(1)).mean())


def build_own(name: str) -> nn.Module:
    """Build a model by name, without dropout."""
    if name == "row_mean":
        return RowMean()
    import transformers as hf

    makers = {
        "gpt2": _gpt2,
        "wrapped": lambda hf: Wrapped(_gpt2(hf)),
        "bart": _bart,
        "t5": _t5,
        "llava": _llava,
        "bert": lambda hf: hf.BertForMaskedLM(hf.BertConfig(**_SIZES)),
        "classifier": lambda hf: hf.BertForSequenceClassification(hf.BertConfig(**_SIZES, num_labels=5)),
        "regression": lambda hf: hf.BertForSequenceClassification(hf.BertConfig(**_SIZES, num_labels=1)),
        "vit": lambda hf: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=6,
                patch_size=3,
                num_labels=5,
            )
        ),
        "mixtral_aux": lambda hf: hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **_SIZES,
                num_key_value_heads=2,
                num_local_experts=4,
                output_router_logits=True,
                router_aux_loss_coef=0.5,
                use_cache=False,
            )
        ),
    }
    model = makers[name](hf)
    turn_off_dropout(model)
    return model


def own_batch(name: str, *, rows: tuple[int, ...] = ROWS) -> dict[str, Tensor]:
    """Return a batch for a model of `build_own`."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY - 1, (len(rows), 12), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(len(rows), 3, 6, 6, generator=generator), "labels": ids[:, 0] % 5}
    if name == "classifier":
        return {"input_ids": ids, "labels": ids[:, 0] % 5}
    if name == "regression":
        return {"input_ids": ids, "labels": ids[:, 0] / 5.0}
    labels = ids.clone()
    for row, valid in zip(labels, rows, strict=True):
        row[valid:] = -100
    if name == "wrapped":
        return {"ids": ids, "labels": labels}
    if name == "llava":
        ids[:, :4] = VOCABULARY - 1
        labels[:, :1] = -100
        pixels = torch.randn(len(rows), 3, 4, 4, generator=generator)
        return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
    return {"input_ids": ids, "labels": labels}


def own_steps(name: str, line: str, *, rows: tuple[int, ...] = ROWS) -> list[testing.StepRecord]:
    """Train under a plan by the model's own loss: a batch whose rows count alike, then one whose rows do not."""
    batches = [own_batch(name, rows=(12,) * len(rows)), own_batch(name, rows=rows)]
    return testing.plan_steps(functools.partial(build_own, name), mw.Plan.parse(line), batches)


# -- losses ---------------------------------------------------------------------------------------------------------------


def contrastive(outputs: Tensor, batch: Any) -> Tensor:
    """InfoNCE: each sample against all others of the batch."""
    ours, theirs = F.normalize(outputs, dim=1), F.normalize(batch[1], dim=1)
    scores = ours @ theirs.T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def spread(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean() + 0.1 * outputs.std(0).mean()


def largest(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean(1).max()


def total(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean(1).sum()


def root(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean().sqrt()


def class_weights(outputs: Tensor, batch: Any) -> Tensor:
    labels = batch[1].argmax(1)
    return F.cross_entropy(outputs, labels, weight=torch.arange(1.0, 6.0, dtype=outputs.dtype))


def contrastive_as_sum(outputs: Tensor, batch: Any) -> mw.Loss:
    """The same, taken part by part on purpose."""
    return mw.Loss(contrastive(outputs, batch) * len(outputs), len(outputs))


def total_as_sum(outputs: Tensor, batch: Any) -> mw.Loss:
    return mw.Loss(total(outputs, batch), len(outputs))


def token_mean(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def pad_mean(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), ignore_index=0)


def trained_weight(outputs: Tensor, batch: Any) -> mw.Loss:
    weight = torch.sigmoid(outputs[:, 0])
    return mw.Loss((weight * (outputs - batch[1]).square().mean(1)).sum(), weight.sum())


def held_weight(outputs: Tensor, batch: Any) -> mw.Loss:
    loss = trained_weight(outputs, batch)
    return mw.Loss(loss.sum, loss.weight.detach())  # type: ignore[union-attr]


def negative_on_rank_1(outputs: Tensor, batch: Any) -> mw.Loss:
    world = mw.current_world()
    sign = -1.0 if world is not None and world.rank == 1 else 1.0
    return mw.Loss((outputs - batch[1]).square().sum(), torch.tensor(sign * outputs.numel()))


# -- models ---------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A table and a head, position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(torch.tanh(hidden - hidden.mean(0)))


class Counting(nn.Module):
    """Counts its calls in an attribute, a list and a buffer, and draws a number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(7, 5), nn.Dropout(0.4)
        self.calls, self.sizes = 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.steps += 1
        self.last = len(x)
        return self.drop(self.linear(x)) * (1 + 0.1 * self.calls)


def build(name: str) -> nn.Module:
    models: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)),
        "dropout": lambda: nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, 5)),
        "batch_norm": lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)),
        "tokens": Tokens,
        "centred": Centred,
        "counting": Counting,
    }
    return models[name]().double()


def pairs(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_samples, size, generator=generator, dtype=torch.float64) for size in (7, 5))  # type: ignore[return-value]


def token_pairs(rows: tuple[int, ...], ignored: int = -100) -> tuple[Tensor, Tensor]:
    batch = own_batch("bert", rows=rows)
    labels = batch["labels"]
    return batch["input_ids"], labels.masked_fill(labels == -100, ignored)


def try_losses(
    name: str, line: str, losses: list[str], num_samples: int = 7
) -> list[tuple[str, str | None, list[str]]]:
    """Take a step under each loss: the message and the fix with which it is refused, or "" and the losses' reasons."""
    found: list[tuple[str, str | None, list[str]]] = []
    for loss in losses:
        model = mw.apply_plan(functools.partial(build, name), line, loss_fn=globals()[loss])
        try:
            before = list(model.full_state_dict().values())
            model.step(mw.split_batch(pairs(num_samples), model))
            found.append(("", None, [r for r in model.plan.reasons if r.startswith("loss")]))
        except mw.ApplyError as error:
            unchanged = all(torch.equal(a, b) for a, b in zip(before, model.full_state_dict().values(), strict=True))
            found.append((error.message if unchanged else "parameters were changed", error.fix, []))
        finally:
            model.close()
    return found


def token_steps(line: str, loss: str, rows: list[tuple[int, ...]], ignored: int = -100) -> list[testing.StepRecord]:
    batches = [token_pairs(each, ignored) for each in rows]
    return testing.plan_steps(functools.partial(build, "tokens"), mw.Plan.parse(line), batches, globals()[loss])


def count_calls(line: str) -> list[Any]:
    """Return what a model that counts holds after one step, and its next random number."""
    counting = functools.partial(build, "counting")
    with mw.apply_plan(counting, line, loss_fn=mean_square, seed=4, rng="torch") as model:
        for step in range(2):
            model.step(mw.split_batch(pairs(6, step), model))
        module: Any = model.module
        return [module.calls, module.sizes, module.steps.item(), module.last, torch.rand(()).item()]


def mean_square(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def build_checkpointed(**options: bool) -> nn.Module:
    return models.Checkpointed(**options).double()


class Annealed:
    """A loss that counts its calls, by a number or by an iterator, and is another from the fourth one on."""

    def __init__(self, *, by_iterator: bool) -> None:
        self.num_calls = 0
        self.calls = itertools.count(1) if by_iterator else None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        self.num_calls = self.num_calls + 1 if self.calls is None else next(self.calls)
        return mean_square(outputs, batch) * (1.0 if self.num_calls < 4 else 0.5)
