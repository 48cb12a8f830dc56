"""Model as the planner sees it: layers in order, with sizes and work, and the parameters that layers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal, Self

from meshwright.errors import ConfigError, did_you_mean
from meshwright.spec.layer import LayerBond, LayerSpec, SharedParameter
from meshwright.spec.transformer import TransformerShape, transformer_layers
from meshwright.units import format_bytes
from meshwright.values import Problems, Value

__all__: list[str] = []

Autocast = Literal["none", "cpu", "cuda"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Value):
    """A model without its weights.

    Args:
        name: What to call it.
        layers: The layers in the order in which data passes them.
        shared: The parameters that are used in several places.
        bonds: Layers that a pipeline leaves on one stage.
        sequence_length: The tokens of the sample that the layers' numbers are for; None where there are none [tokens].
        num_heads: Attention heads, where known: tp must divide them [count].
        num_kv_heads: Key and value heads, where known [count].
        hidden_size: Width of the residual stream, where known [elements].
        vocab_size: Rows of the embedding, where known [count].
        buffers_bytes: Buffers, and tensors that modules keep as attributes; every rank has all of them [bytes].
        autocast: Devices under whose autocast to bfloat16 the forward was seen to run: "cuda", "cpu" or "none". Its numbers are
            for plans in bf16 alone, and have each operator's own dtype; of a model without autocast such a plan costs half of
            the bytes.
        notes: What the description could not see, for people.

    Raises:
        ConfigError: There are no layers, names repeat, or a shared parameter or a bond names an unknown layer.
    """

    FORMAT: ClassVar[str] = "model"

    name: str
    layers: tuple[LayerSpec, ...]
    shared: tuple[SharedParameter, ...] = ()
    bonds: tuple[LayerBond, ...] = ()
    sequence_length: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    buffers_bytes: int = 0
    autocast: Autocast = "none"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"model '{self.name}'")
        problems.require(len(self.layers) >= 1, "no layers (rule: one or more)")
        names = [layer.name for layer in self.layers]
        sizes = {layer.name: layer.num_params for layer in self.layers}
        for name in sorted(_repeated(names)):
            problems.add(f"the layer name '{name}' is used {names.count(name)} times (rule: each once)")
        for parameter in self.shared:
            for layer in parameter.layers:
                problems.require(
                    layer in sizes,
                    f"shared '{parameter.names[0]}' is in layer '{layer}', which does not exist"
                    f"{did_you_mean(layer, names)}",
                )
                problems.require(
                    sizes.get(layer, parameter.num_params) >= parameter.num_params,
                    f"shared '{parameter.names[0]}' has {parameter.num_params} elements, its layer '{layer}' only "
                    f"{sizes.get(layer)} (rule: each layer counts it in full)",
                )
        for bond in self.bonds:
            for name in (bond.first, bond.last):
                problems.require(
                    name in sizes, f"a bond names the layer '{name}', which does not exist{did_you_mean(name, names)}"
                )
        for field in ("sequence_length", "num_heads", "num_kv_heads", "hidden_size", "vocab_size"):
            number = getattr(self, field)
            problems.require(number is None or number >= 1, f"{field}={number} (rule: it is at least 1)")
        problems.require(self.buffers_bytes >= 0, f"buffers_bytes={self.buffers_bytes} (rule: it is at least 0)")
        problems.check()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_params:,} parameters, {format_bytes(self.params_bytes)}, {len(self.layers)} layers"
        )

    @property
    def num_params(self) -> int:
        """Parameters of the model, shared ones once [count]."""
        repeated = sum((len(parameter.layers) - 1) * parameter.num_params for parameter in self.shared)
        return sum(layer.num_params for layer in self.layers) - repeated

    @property
    def params_bytes(self) -> int:
        """Size of the parameters, shared ones once [bytes]."""
        repeated = sum((len(parameter.layers) - 1) * parameter.params_bytes for parameter in self.shared)
        return sum(layer.params_bytes for layer in self.layers) - repeated

    @property
    def forward_flops(self) -> float:
        """Arithmetic of one sample's forward pass [FLOPs]."""
        return sum(layer.forward_flops for layer in self.layers)

    def num_pieces(self, *, under_tp: bool) -> int:
        """Return how many stages a pipeline can have at most: layers that run, where those with a bond are one [count].

        Args:
            under_tp: Whether tensor parallelism splits layers too.
        """
        places = {layer.name: place for place, layer in enumerate(self.layers)}
        reach = list(range(len(self.layers)))
        for bond in self.bonds:
            if under_tp or bond.when == "always":
                start, end = sorted((places[bond.first], places[bond.last]))
                reach[start] = max(reach[start], end)
        found, end, is_empty = 0, -1, False
        for place, layer in enumerate(self.layers):
            if place > end:
                is_empty = True
            end = max(end, reach[place])
            if is_empty and layer.runs:
                found, is_empty = found + 1, False
        return max(1, found)

    @property
    def splits_inside_stages(self) -> bool:
        """Whether tensor parallelism has a product to split that lies within one stage of a pipeline."""
        around = {name for bond in self.bonds if bond.when == "around" for name in (bond.first, bond.last)}
        has_chain = any(bond.when == "tensor" for bond in self.bonds)
        return has_chain or any(layer.is_split(alone=not around) for layer in self.layers if layer.name not in around)

    @classmethod
    def transformer(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int,
        sequence: int,
        kv_heads: int | None = None,
        intermediate: int | None = None,
        head_size: int | None = None,
        gated: bool = False,
        tied: bool = False,
        norm: Literal["layer", "rms"] | None = None,
        bias: bool | None = None,
        learned_positions: bool | None = None,
        element_bytes: int = 4,
        fused_attention: bool = True,
        causal: bool = True,
        dropout: bool = False,
        experts: int = 1,
        experts_per_token: int = 1,
        name: str = "transformer",
    ) -> Self:
        """Return a decoder-only transformer, without torch.

        With hidden size h, intermediate size i, s tokens, q = heads * head_size and k = kv_heads * head_size, a block
        has

            parameters   h q + 2 h k + q h  (attention)  +  2 h i, or 3 h i where gated  (MLP)  + biases + 2 norms
            FLOPs        2 s * (its matrix elements)  +  4 s^2 q  (scores and values, the causal half not left out)
            activations  s * (4 h + 2 q + 2 k  +  2 i, or 4 i where gated)  elements: the inputs of both norms, of QKV
                         and of the MLP; q, k, v; the attention's output; the MLP's inner values. No dropout, and
                         a fused attention that keeps no s x s scores.

        and the head 2 s h vocab FLOPs. For multi-head attention with i = 4 h this is 24 s h^2 + 4 s^2 h FLOPs a block
        and 16 s h activation elements.

        Args:
            layers: Blocks [count].
            hidden: Width of the residual stream [elements].
            heads: Attention heads [count].
            vocab: Rows of the embedding [count].
            sequence: Tokens of a sample [tokens].
            kv_heads: Key and value heads; None means as many as heads [count].
            intermediate: Width inside the MLP; None means 4 * hidden [elements].
            head_size: Width of a head; None means hidden / heads [elements].
            gated: Llama's manner: a gated MLP, and where not said otherwise RMS norms, no biases, no learned positions.
                Otherwise GPT-2's: layer norms, biases, learned positions.
            tied: The head uses the embedding's matrix.
            norm: "layer" has a weight and a bias, "rms" only a weight.
            bias: Whether the block's linear layers have biases; the head never has one.
            learned_positions: Whether positions are an embedding of ``sequence`` rows.
            element_bytes: Size of a parameter and of an activation: 4 for fp32, 2 for bf16 [bytes].
            fused_attention: Attention by one kernel that keeps no scores; otherwise two products and a softmax.
            causal: Whether a token sees only those before it.
            dropout: Whether there is dropout, whose masks are kept.
            experts: MLPs of a block, of which each token passes some; 1 is a plain MLP [count].
            experts_per_token: MLPs that a token passes [count].
            name: What to call it.

        Returns:
            The model: an embedding, the blocks, and a head with the last norm.

        Raises:
            ConfigError: A size is below 1, or the heads do not divide.

        Source:
            FLOPs: Narayanan et al. 2021, arXiv:2104.04473, appendix. Activations: Korthikanti et al. 2022,
            arXiv:2205.05198, section 4.1, equation 1 without its dropout masks and (fused attention) its 5 a s / h.

        >>> gpt2 = ModelSpec.transformer(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024, tied=True)
        >>> gpt2.num_params
        124439808
        """
        is_whole = _is_size(hidden) and _is_size(heads)
        if head_size is None and is_whole and hidden % heads:
            raise ConfigError(
                f"transformer: hidden={hidden} with heads={heads} (rule: heads divide hidden, unless head_size is given)",
                fix=f"hidden={-(-hidden // heads) * heads}",
            )
        shape = TransformerShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_size=head_size if head_size is not None else (hidden // heads if is_whole else 1),
            intermediate=(4 * hidden if is_whole else 1) if intermediate is None else intermediate,
            vocab=vocab,
            sequence=sequence,
            gated=gated,
            tied=tied,
            norm=norm or ("rms" if gated else "layer"),
            bias=not gated if bias is None else bias,
            learned_positions=not gated if learned_positions is None else learned_positions,
            element_bytes=element_bytes,
            fused_attention=fused_attention,
            causal=causal,
            dropout=dropout,
            experts=experts,
            experts_per_token=experts_per_token,
        )
        found, shared = transformer_layers(shape)
        return cls(
            name=name,
            layers=found,
            shared=shared,
            sequence_length=sequence,
            num_heads=heads,
            num_kv_heads=shape.kv_heads,
            hidden_size=hidden,
            vocab_size=vocab,
        )


def _is_size(number: object) -> bool:
    return isinstance(number, int) and number >= 1


def _repeated(names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    return {name for name in names if name in seen or seen.add(name)}
