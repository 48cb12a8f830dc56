"""Setup of a step: everything beside model and cluster that its cost depends on, as plain numbers."""

from __future__ import annotations

import dataclasses
import operator
from typing import Final, Self

from meshwright.errors import ConfigError
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.train import TrainSpec
from meshwright.traffic import WHOLE_BELOW_BYTES

__all__: list[str] = []

_SENT_BYTES: Final = {"bf16": 2.0, "int8": 260 / 256, "int4": 68 / 128}
"""Of one gradient element under a compression: a code, and its part of a block's scale in fp32, as `comm/compression` sends it
[bytes]."""


_CAST_ACCUMULATED_BYTES: Final = 12.0
"""Traffic of a gradient element that is added to those before, where autocast has cast it to fp32: 4 and 4 read, 4 written
[bytes]."""


def run_again(recompute: str) -> str:
    """Return what a plan's recompute runs again; `apply/recompute` keeps results of products and attention under "selective"."""
    return "all_but_products" if recompute == "selective" else recompute


def is_per_step(zero: int, pp: int) -> bool:
    """Tell whether this project's ZeRO exchanges once a step: stage 1 does, and the others do under a pipeline."""
    return zero == 1 or (zero > 1 and pp > 1)


def _sent_gradient_bytes(compress: str) -> float:
    if compress not in _SENT_BYTES:
        raise ConfigError(
            f"plan: compress={compress} has no cost (rule: what it sends depends on each matrix's shape; known: "
            f"{', '.join(_SENT_BYTES)})",
            fix="compress=int8",
        )
    return _SENT_BYTES[compress]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that a rank keeps for one parameter, before anything is sharded."""

    parameter: float
    gradient: float
    optimizer: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Degrees, batch and numerics of one step.

    `of` makes it from a plan of this project; published runs of other tools are written down directly.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    shard: int = 1
    """Neighbours that ZeRO shards over [count]."""
    virtual: int = 1
    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv, or sequential: one stage after the other, nothing beside it."""
    micro_batches: int = 1
    micro_batch_size: float = 1.0
    """Samples of one forward of one rank [samples]."""
    sequence_parallel: bool = False
    recompute: str = "none"
    """none, full, selective (attention cores run again, as in Megatron), all_but_products (as in this project) or
    every_other_product (as in torchtitan, which keeps the rest and attention)."""
    dtype: str = "fp32"
    """What products are computed in: fp32, tf32, bf16, fp16, fp8, mxfp8 or nvfp4."""
    element_bytes: float = 4.0
    """Of an activation [bytes]."""
    own_dtypes: bool = False
    """Whether each operator computes in the dtype that it was seen in, as far as that is known."""
    states: StateBytes = StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0)
    sent_gradient_bytes: float = 4.0
    """Of one gradient element as it is reduced [bytes]."""
    gathered_bytes: float = 4.0
    """Of one parameter element as ZeRO-3 gathers it, or ZeRO-1 after the update [bytes]."""
    overlap: bool = True
    overlaps_tp: bool = False
    """Whether collectives of sequence parallelism run piece by piece beside their products: this project's do not."""
    gathers_low: bool = False
    """Whether sequence parallelism gathers what products in fp8 read after it was cast, in a byte an element."""
    tp_operators: float = 0.0
    """Operators of mean size that the host issues beside an exchange over tp, where products are cut to overlap it [count]."""
    kv_share: float = 1.0
    """Heads of keys and values over those of queries, where cp sends them round [ratio]."""
    is_eager: bool = True
    """Whether PyTorch runs one kernel after the other as the model says, with today's fused attention and overlap."""
    native_attention: bool = False
    """Whether fused attention is written for this generation of device (cuDNN's, FlashAttention-3), not for the one before."""
    attention_speed: float = 1.0
    """Of its fused attention over FlashAttention-2 or what is its equal [ratio]."""
    loss_traffic: tuple[float, float] = (16.0, 24.0)
    """What cross-entropy reads and writes for each logit in forward and in backward: PyTorch's, or of a tool that has its own
    [bytes]."""
    loss_kept: float = 8.0
    """What it keeps for each logit beside the logits, in fp32 or not at all [bytes]."""
    keeps_gathered: bool = False
    """Whether a layer that runs again keeps the whole sequence that its products read meanwhile, not the slice of it."""
    copies_per_rank: float = 0.0
    """Copies that the host issues for each rank of a gathering, where it is made into a list of tensors [count]."""
    calls_per_layer: float = 1.0
    """Collectives in which data parallelism exchanges a layer; tools without buckets have one for each tensor [count]."""
    accumulated_bytes: float = 10.0
    """Traffic of one gradient element that is added to those of the micro-batches before: 2 read, 4 read, 4 written; less where
    the product itself adds [bytes]."""
    sends_slices: bool = False
    """Whether tp ranks send a slice each to the next stage, and their receivers gather: this project's send it whole."""
    trains_weights: bool = True
    """False where adapters alone are trained, whose gradients are small."""
    offloads_optimizer: bool = False
    per_step: bool = False
    """Whether ZeRO gathers once before the passes of a step and sums once after them, so that nothing hides it."""
    global_batch_size: int | None = None
    """Samples of a step; None where all micro-batches of all ranks are as large [samples]."""
    replicas_gradient_bytes: float | None = None
    """Of one gradient element between copies of a shard, where it is not as it is reduced over the shard [bytes]."""
    cut_by_work: bool = False
    """Whether stages are cut as this project's runtime cuts them, not by their time on the cluster at hand."""
    cut_evenly: bool = False
    """Whether stages have as many layers each where that comes out even, as tools do that cut a transformer by its blocks."""
    cut_by_shares: bool = False
    """Whether a stage takes layers until its share of the work is full, though others are left with less."""
    blocks_on_messages: bool = False
    """Whether each message between stages is waited for by itself, and a stage's results are kept until their gradients are
    there, as by DeepSpeed's pipeline engine; others send and receive in pairs."""
    keeps_head: bool = False
    """Whether blocks alone run again, as other tools have it, and not what follows the last one."""
    waits_for_device: bool = False
    """Whether the host waits for each kernel before it issues the next one (CUDA_LAUNCH_BLOCKING=1)."""
    whole_below: float = 0.0
    """ZeRO-3 keeps layers with fewer bytes of parameters whole [bytes]."""
    one_process: bool = False
    """Whether one process has all devices, so that on a CPU they share its memory."""

    @classmethod
    def of(cls, model: ModelSpec, plan: Plan, train: TrainSpec) -> Self:
        """Return the setup of a plan, on the rank with the most samples."""
        own_bytes = model.params_bytes / model.num_params if model.num_params else 4.0
        sent = own_bytes if plan.compress == "none" else _sent_gradient_bytes(plan.compress)
        has_copies = plan.zero > 0 and plan.shard_degree < plan.dp
        is_bf16 = plan.precision == "bf16"  # what is applied is the plan
        is_cast = model.autocast != "none"
        if is_cast and not is_bf16:
            raise ConfigError(
                f"'{model.name}' was described under autocast to bfloat16, and the plan has precision={plan.precision} (rule: "
                "numbers of autocast are for plans in bf16)",
                fix='precision=bf16, or describe the model with autocast="none"',
            )
        size = 2.0 if is_bf16 else own_bytes
        share = -(-train.global_batch_size // plan.num_shares)
        micro_batches = max(plan.micro_batches, -(-share // (plan.micro_batch_size or share)))
        return cls(
            dp=plan.dp,
            tp=plan.tp,
            pp=plan.pp,
            cp=plan.cp,
            kv_share=model.num_kv_heads / model.num_heads if model.num_kv_heads and model.num_heads else 1.0,
            zero=plan.zero,
            shard=plan.shard_degree if plan.zero else 1,
            virtual=plan.virtual,
            # One process runs one stage after the other.
            schedule="sequential" if plan.mode == "model_parallel" else plan.schedule,
            micro_batches=micro_batches,
            micro_batch_size=share / micro_batches,
            sequence_parallel=plan.uses_sequence_parallel,
            recompute=run_again(plan.recompute),
            dtype="bf16" if is_bf16 or own_bytes == 2.0 else "fp32",
            element_bytes=size,
            own_dtypes=is_cast or not is_bf16,
            accumulated_bytes=_CAST_ACCUMULATED_BYTES if is_cast else 10.0,
            states=StateBytes(
                parameter=own_bytes,
                gradient=own_bytes,
                optimizer=train.optimizer_bytes_per_param / 4.0 * own_bytes,
            ),
            sent_gradient_bytes=own_bytes if has_copies else sent,
            replicas_gradient_bytes=sent if has_copies else None,
            gathered_bytes=own_bytes,
            overlap=plan.overlap,
            offloads_optimizer=plan.offload == "optimizer",
            per_step=is_per_step(plan.zero, plan.pp),
            global_batch_size=train.global_batch_size,
            cut_by_work=True,
            whole_below=WHOLE_BELOW_BYTES if plan.whole_below is None else plan.whole_below,
            one_process=plan.mode != "ranks",
        )

    def with_fields(self, **changes: object) -> Self:
        """Return this setup with other fields: `dataclasses.replace`, for a search that makes tens of thousands."""
        fields = dict(zip(_FIELDS, _values_of(self), strict=True))
        fields.update(changes)
        return type(self)(**fields)  # type: ignore[arg-type]

    @property
    def num_devices(self) -> int:
        """Devices [count]."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks [count]."""
        return self.pp * self.virtual


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Setup))
_values_of: Final = operator.attrgetter(*_FIELDS)

SEEN_BY_LAYERS: Final = (
    "tp", "cp", "micro_batch_size", "sequence_parallel", "dtype", "element_bytes", "own_dtypes", "overlaps_tp", "is_eager",
    "trains_weights", "native_attention", "attention_speed", "loss_traffic", "loss_kept", "gathers_low", "tp_operators",
    "kv_share", "waits_for_device", "keeps_head",
)  # fmt: skip
"""What a layer sees of a setup: setups that differ in nothing else share its cost."""

SEEN_BY_PIPELINE: Final = (
    *SEEN_BY_LAYERS, "dp", "pp", "virtual", "schedule", "micro_batches", "recompute", "overlap", "accumulated_bytes",
    "sends_slices", "cut_by_work", "cut_evenly", "cut_by_shares", "blocks_on_messages", "one_process", "keeps_gathered",
)  # fmt: skip
"""What a pipeline sees of a setup."""

seen_by_layers: Final = operator.attrgetter(*SEEN_BY_LAYERS)
seen_by_pipeline: Final = operator.attrgetter(*SEEN_BY_PIPELINE)
