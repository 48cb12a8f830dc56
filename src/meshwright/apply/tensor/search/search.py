"""Search from a model and one batch to a layout: trace, propose, prove. What is not proven stays whole, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.modules.copies import copy_module
from meshwright.apply.tensor.attention import attention_region
from meshwright.apply.tensor.copied_attributes import attributes_shown
from meshwright.apply.tensor.proof.scope_values import LastDrawn
from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError
from meshwright.apply.tensor.search.candidates import Options, candidates
from meshwright.apply.tensor.search.deadline import DEFAULT_PATIENCE_S, Deadline
from meshwright.apply.tensor.search.joint_proofs import Together, likely_regions
from meshwright.apply.tensor.search.kept_parts import stored_regions
from meshwright.apply.tensor.search.other_layers import layer_by_its_outputs
from meshwright.apply.tensor.search.pairs import Pair, feeds_only_the_output, in_order, meets_whole, pair_of
from meshwright.apply.tensor.search.proven_calls import ProvenCalls
from meshwright.apply.tensor.search.regions import Proving
from meshwright.apply.tensor.search.remainder import Remainder
from meshwright.apply.tensor.search.sequences import find_chains
from meshwright.apply.tensor.search.trace import Product, Trace
from meshwright.apply.tensor.tensor_layout import Chain, Cut, Region, Role, TensorLayout

__all__: list[str] = []

SMALL_SHARE = 0.01
"""A layer that stands alone is cut only where it holds at least this share of the parameters: to cut it costs an exchange."""

_MEETS_WHOLE = (
    "what it gives meets a whole tensor of the same shape before the next layer: a stream that layers add to, say"
)


class Search:
    """The search for a layout.

    Args:
        module: The whole model; it is not changed.
        num_tp_ranks: Ranks that share it [count].
        run: Runs a copy of the model, with its loss, on a small batch, and returns the model's outputs.
        wanted: FQN -> "whole", "column" or "row", where the plan says so.
        patience_s: How long the other ranks wait for the layout [s].
    """

    def __init__(
        self,
        module: nn.Module,
        num_tp_ranks: int,
        run: Callable[[nn.Module], Any],
        wanted: dict[str, str] | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        self.num_tp_ranks = num_tp_ranks
        self._wanted = wanted or {}
        self._reasons: dict[int, str] = {}
        self._regions: list[Region] = []
        self._taken: set[int] = set()
        self._failed: set[int] = set()  # of pairs that could not be cut
        self._drawn = LastDrawn()
        self._deadline = Deadline(patience_s)
        try:
            self._follow(module, run, trainable=True)
        except Exception:  # noqa: BLE001 - code that writes into frozen parameters; the user's own errors come again
            self._follow(module, run, trainable=False)

    def _follow(self, module: nn.Module, run: Callable[[nn.Module], Any], *, trainable: bool) -> None:
        """Trace a copy of the model in training mode, with every parameter trainable: both may come later."""
        # Tensors that forward writes into are buffers, which the copy has of its own. Parameters share their memory, and are
        # other objects: autograd remembers a parameter's shape for as long as a graph that used it lives.
        self._model = copy_module(
            module,
            lambda tensor: tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.clone(),
            trainable=trainable,
        )
        if not self._model.training:
            self._model.train()
        theirs = [*module.parameters(), *module.buffers()]
        own = [*self._model.parameters(), *self._model.buffers()]
        originals = {id(one): id(other) for one, other in zip(theirs, own, strict=True)}
        self._trace = Trace(self._model, originals)
        with (
            torch.random.fork_rng(enabled=True),
            torch.enable_grad(),
            attributes_shown(module, self._model),
            self._trace,
        ):
            self._trace.finish(run(self._model))
        self._trace.stop()
        self._num_elements = sum(parameter.numel() for parameter in self._trace.parameters.values())
        self._proving = Proving(self._trace, self._regions, self.num_tp_ranks, self._drawn, self._deadline)

    def layout(self, *, on_slices: bool = True) -> TensorLayout:
        """Return the layout, with the reasons for what is not cut; `on_slices` lets layers run on slices of the sequence."""
        for key in self._by_wish("whole"):
            self._taken.add(key)
            self._reasons[key] = "the plan says so"
        self._leave_what_the_loss_reads()
        self._attention()
        self._vocabularies()
        self._pairs()
        self._vocabularies(are_sides=True)
        self._lone_layers()
        self._proving.forget()
        chains: tuple[Chain, ...] = ()
        if on_slices:
            chains, self._regions[:] = find_chains(
                self._trace, self._regions, self.num_tp_ranks, self._drawn, self._proving
            )
        self._keep_in_parts(chains)
        self._proving.forget()
        layout = TensorLayout(regions=tuple(self._regions), chains=chains, whole=self._whole(), alone=self._alone())
        proven = ProvenCalls(self._trace, self._proving, self.num_tp_ranks, self._drawn)
        return layout.replace(
            proven={
                name: proven.of(name, resizes=part.resizes)
                for name, part in layout.parts().items()
                if not part.is_stored
            }
        )

    def _by_wish(self, wish: str) -> list[int]:
        return [
            key for key, names in self._trace.names.items() if any(self._wanted.get(name) == wish for name in names)
        ]

    def _leave_what_the_loss_reads(self) -> None:
        """Keep tensors whole that code outside the model's own forward uses: with a shard it would compute something else."""
        for key, uses in self._trace.uses.items():
            if () in uses and key in self._trace.names:
                self._taken.add(key)
                self._reasons.setdefault(
                    key, f"code outside the model's forward reads it ({', '.join(sorted(uses[()]))})"
                )
        for key in self._trace.replaced - self._taken:  # its layer is given whole tensors
            self._taken.add(key)
            self._reasons.setdefault(key, "its layer runs with another tensor in its place (functional_call)")

    # -- kinds of regions ---------------------------------------------------------------------------------------

    def _attention(self) -> None:
        for name, child in self._model.named_modules():
            if isinstance(child, nn.MultiheadAttention) and name in self._trace.calls:
                region = attention_region(child).above(name)
                keys = self._keys(region)
                if not keys & self._taken:
                    self._try(name, [region], keys, "attention")

    def _vocabularies(self, *, are_sides: bool = False) -> None:
        """Cut embeddings by their tokens, and with them the heads that share their weight.

        Those that are looked up beside a pair come after the pairs: what no pair has cut stands alone.
        """
        for embedding, looked_up in self._trace.products.items():
            key = -embedding
            if embedding > 0 or key in self._taken or not self._is_large(key):
                continue
            if self._is_side(looked_up[0]) != are_sides:
                continue
            calls = [*looked_up, *self._trace.products.get(key, ())]
            if self._trace.other_uses.get(key) or not all(self._trace.is_layer(call) for call in calls):
                self._reasons[key] = "it is used outside its own module's forward"
            elif key in self._trace.counting and not all(map(self._is_of_embedding, looked_up)):
                self._reasons[key] = "its look-ups shorten vectors (max_norm) or count ids (scale_grad_by_freq)"
            else:
                self._cut_vocabulary(key, calls)

    def _is_of_embedding(self, call: Product) -> bool:
        return isinstance(self._model.get_submodule(self._trace.owner(call)), nn.Embedding)

    def _is_side(self, call: Product) -> bool:
        """Tell whether an embedding is looked up inside a pair's scope: one value for each head, cut with the pair."""
        for key in self._trace.products:
            pair = pair_of(key, self._trace, set()) if key > 0 else None
            scope = pair.scope(self._trace) if pair else ""
            if pair and scope and call in pair.sides and scope in call.path:
                return True
        return False

    def _cut_vocabulary(self, key: int, calls: list[Product]) -> None:
        embedding = next(call for call in calls if call.kind == "embedding")
        num_tokens = self._trace.parameters[key].shape[embedding.in_dim]
        roles: dict[str, Role] = {}
        cuts = dict.fromkeys(self._trace.names[key], Cut(dim=embedding.in_dim, groups=(num_tokens,), kind="vocabulary"))
        for call in calls:
            name = self._trace.owner(call)
            if call.kind != "embedding" and call.out_dim != embedding.in_dim:
                self._reasons[key] = "it is an embedding and, turned round, a layer"
                return
            roles[name] = "vocabulary" if call.kind == "embedding" else self._head_role(call)
        for other in self._trace.met.get(key, ()):  # a head's bias
            if tuple(self._trace.parameters[other].shape) == (num_tokens,):
                cuts |= dict.fromkeys(self._trace.names[other], Cut(dim=0, groups=(num_tokens,)))
        try:
            roles |= self._roles_of_idle(cuts, roles)
            region = Region(scope="", num_units=num_tokens, cuts=cuts, roles=roles)
            self._proving.prove_each(region)
        except DisprovedError as error:
            self._reasons[key] = error.message
            return
        self._accept(region, self._keys(region))

    def _roles_of_idle(self, cuts: dict[str, Cut], roles: dict[str, Role]) -> dict[str, Role]:
        """Return roles of modules that hold cut tensors and were not called in the first batch: torch's own need no proof.

        Raises:
            DisprovedError: It is another module, whose use of a shard is not known.
        """
        # The use in modules that were called is known.
        known = {id(self._model.get_submodule(name)) for name in (*roles, *self._trace.calls)}
        found: dict[str, Role] = {}
        for name in dict.fromkeys(path.rpartition(".")[0] for path in cuts):
            module = self._model.get_submodule(name)
            if id(module) in known:
                continue
            if type(module) not in (nn.Embedding, nn.Linear):
                raise DisprovedError(f"'{name}' holds it, too, and was not called with the first batch")
            found[name] = "vocabulary" if type(module) is nn.Embedding else "gathered"
        return found

    def _head_role(self, call: Product) -> Role:
        in_slices = feeds_only_the_output(call.key, self._trace) and call.key in self._trace.into_cross_entropy
        return "head" if in_slices else "gathered"

    def _pairs(self) -> None:
        order = in_order(self._trace)
        together = Together(self._proving.prove_together)
        several = likely_regions(
            self._trace, order, self.num_tp_ranks, taken=self._taken, is_wanted=self._may_be_paired
        )
        for scope, regions in several.items():
            together.prove(scope, regions)
        self._cut_pairs(order)
        for region, reason in together.disproved(self._regions):
            self._regions.remove(region)
            self._give_up(self._keys(region), reason)

    def _cut_pairs(self, order: Sequence[int]) -> None:
        for key in order:
            pair = pair_of(key, self._trace, self._taken)
            if pair is None or not self._may_be_paired(pair):
                continue
            rows = {row.parameter for row in pair.rows}
            keys = {*rows, *(column.parameter for column in pair.columns)}
            options = Options(pair, self._trace, self.num_tp_ranks)
            if options.scope not in self._trace.calls:
                continue
            if meets_whole(pair, self._trace):
                self._give_up(keys, _MEETS_WHOLE, may_retry=rows)
                continue
            self._try(options.scope, candidates(options), keys, "pair", may_retry=rows, is_mixed=pair.is_mixed)

    def _may_be_paired(self, pair: Pair) -> bool:
        members = [*pair.rows, *pair.columns]
        if any(self._trace.other_uses.get(member.parameter) for member in members):
            return False
        wishes = [self._wanted.get(name) for column in pair.columns for name in self._trace.names[column.parameter]]
        row = [self._wanted.get(name) for row in pair.rows for name in self._trace.names[row.parameter]]
        return "row" not in wishes and "column" not in row

    def _lone_layers(self) -> None:
        """Cut layers that are in no pair, and those of pairs that could not be cut: each with exchanges of its own.

        Large ones, and while much is whole small ones, too (ADR 0035).
        """
        trace, wished = self._trace, set(self._by_wish("column"))
        chosen = [key for key in (*trace.products, *trace.parameters) if key > 0]
        for key in dict.fromkeys(chosen):
            if key in wished or self._is_large(key):
                self._cut_alone(key)
        for key in self._remainder().by_size():
            self._cut_alone(key)

    def _remainder(self) -> Remainder:
        return Remainder(self._trace, self._regions, self._by_wish("whole"))

    def _keep_in_parts(self, chains: Sequence[Chain]) -> None:
        """Keep weights in parts that no layer is cut by, while much is whole."""
        rest = self._remainder()
        free = [key for key in rest.by_size() if key in self._failed or key not in self._taken]
        layout = TensorLayout(regions=tuple(self._regions), chains=tuple(chains))
        for region, keys in stored_regions(self._trace, free, layout, self.num_tp_ranks):
            if rest.is_much(keys):
                self._try(region.scope, [region], keys, "stored", may_retry=keys)

    def _cut_alone(self, key: int) -> None:
        """Cut a layer by itself, where its weight is free: the weight of a product, or one that is used in another way."""
        calls = self._trace.products.get(key)
        if calls is not None:
            is_free = key in self._failed or key not in self._taken
            if is_free and not self._trace.other_uses.get(key) and all(map(self._trace.is_layer, calls)):
                self._cut_layer(key, calls)
        elif key not in self._taken and -key not in self._trace.products and self._trace.parameters[key].dim() > 1:
            region = layer_by_its_outputs(self._trace, key, self.num_tp_ranks)
            if region is not None:
                self._try(region.scope, [region], {key}, "other layer")

    def _cut_layer(self, key: int, calls: list[Product]) -> None:
        call, width = calls[0], self._trace.parameters[key].shape[calls[0].out_dim]
        if width < self.num_tp_ranks:
            self._reasons.setdefault(key, f"it has {width} outputs for {self.num_tp_ranks} ranks")
            return
        cuts = dict.fromkeys(self._trace.names[key], Cut(dim=call.out_dim, groups=(width,)))
        for other in self._trace.met.get(key, ()):
            if tuple(self._trace.parameters[other].shape) == (width,):
                mine = [n for n in self._trace.names[other] if n.rpartition(".")[0] == self._trace.owner(call)]
                cuts |= dict.fromkeys(self._trace.names[other] if mine else [], Cut(dim=0, groups=(width,)))
        roles: dict[str, Role] = {self._trace.owner(one): self._head_role(one) for one in calls}
        try:
            roles |= self._roles_of_idle(cuts, roles)
        except DisprovedError as error:
            self._reasons.setdefault(key, error.message)
            return
        scope = self._trace.owner(call)
        region = Region(scope=scope, num_units=width, cuts=cuts, roles=roles)
        self._try(scope, [dict(region.by_module())[scope]], {key}, "layer", accept=region)

    # -- proving ------------------------------------------------------------------------------------------------

    def _try(
        self,
        scope: str,
        tries: Iterable[Region],
        keys: set[int],
        kind: str,
        *,
        may_retry: Collection[int] = (),
        accept: Region | None = None,
        is_mixed: bool = False,
    ) -> None:
        proven, error = self._proving.find(scope, tries, keys, kind, accept, is_mixed=is_mixed)
        if proven is not None:
            final = accept or proven
            self._accept(final, self._keys(final))
            return
        if kind == "layer":
            error = next((self._reasons[key] for key in keys if key in self._reasons), error)
        self._give_up(keys, error, may_retry=may_retry)

    def _give_up(self, keys: set[int], reason: str, *, may_retry: Collection[int] = ()) -> None:
        for key in keys:
            if key not in may_retry:
                self._taken.add(key)
            self._failed.add(key)
            self._reasons[key] = reason

    def _accept(self, region: Region, keys: set[int]) -> None:
        self._regions.append(region)
        self._taken |= keys
        self._failed -= keys
        held = self._proving.held(region)
        for key, names in self._trace.names.items():
            if not held.isdisjoint(names):
                self._taken.add(key)
                self._failed.discard(key)
                self._reasons.setdefault(key, "every rank computes with all of it, inside something that is cut")

    def _keys(self, region: Region) -> set[int]:
        keys = {self._trace.keys[name] for name in region.cuts if name in self._trace.keys}
        for path in region.shared:
            for parameter in self._model.get_submodule(path).parameters():
                keys.add(id(parameter))
                self._reasons[id(parameter)] = "fewer keys than ranks: each rank uses its part of all"
        return keys

    def _is_large(self, key: int) -> bool:
        return self._trace.parameters[key].numel() >= SMALL_SHARE * self._num_elements

    def _whole(self) -> dict[str, str]:
        cut = {name for region in self._regions for name in region.cuts}
        found = {}
        for key, names in self._trace.names.items():
            if names[0] in cut:
                continue
            found[names[0]] = self._reasons.get(key) or self._why_untouched(key)
        return found

    def _alone(self) -> dict[str, str]:
        apart = {name for region in self._regions if region.is_apart for name in region.cuts}
        return {
            names[0]: self._reasons[key]
            for key, names in self._trace.names.items()
            if names[0] in apart and key in self._reasons and key in self._trace.products
        }

    def _why_untouched(self, key: int) -> str:
        parameter = self._trace.parameters[key]
        if key in self._trace.products or -key in self._trace.products:
            if self._trace.other_uses.get(key):
                return f"it is also used by {', '.join(sorted(self._trace.other_uses[key]))}"
            return "it stands alone and is small"
        if sum(size > 1 for size in parameter.shape) <= 1:
            return "a vector outside what is cut"
        uses = self._trace.other_uses.get(key)
        return f"it is used by {', '.join(sorted(uses))}, which mixes its entries" if uses else "it was not used"
