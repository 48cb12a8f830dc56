"""Guard of one part: the calls for which shards are proven to equal the whole, and the proof of a new call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import draws_untouched
from meshwright._torch_private import WrapperTensor, current_function_mode, without_function_modes
from meshwright.apply.modules.copies import rebind
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.hook_tables import is_ours
from meshwright.apply.state.random_states import kept_random_states
from meshwright.apply.tensor.cutting import Cutting
from meshwright.apply.tensor.guards import signatures
from meshwright.apply.tensor.guards.ambient import Ambient, current_ambient
from meshwright.apply.tensor.guards.described import OWN, digest
from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError, in_words
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.tensor_layout import TensorLayout, is_inside, name_below
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.ranks.allocator import memory_kept
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_log = logging.getLogger(__name__)

_HOW_HOOKS_RUN = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

_WITHOUT_NUMBERS = (nn.Parameter, Slices, WrapperTensor)

MAX_PROOFS = 64
"""Proofs of one part while it runs [count]. A call that is new after that runs whole: its arguments never repeat."""


_all: weakref.WeakSet[Guard] = weakref.WeakSet()


@contextlib.contextmanager
def denials_kept(module: nn.Module) -> Iterator[None]:
    """Let drawing parts of a model run whole from now on, if a call inside the context was not proven.

    Random numbers have their places by how a layer ran there: on shards they would be other ones, without a word.
    """
    before = {guard: guard.num_denied for guard in _all if guard.draws_in(module)}
    yield
    for guard, num_denied in before.items():
        guard.is_closed |= guard.num_denied > num_denied


class Guard:
    """The proven calls of one part.

    Args:
        cutting: The cut model.
        name: The part's FQN.
        layout: Its regions, and its layer as a chain of one, with names that start at the part's module.
        template: A copy of the module from before the cut, whose parameters have no values.
    """

    def __init__(self, cutting: Cutting, name: str, layout: TensorLayout, template: nn.Module) -> None:
        self.reasons: list[str] = []
        """Why calls ran whole; each once."""
        self.num_proofs = 0
        """Proofs that were made while the model ran [count]."""
        self.num_denied = 0
        """Calls that ran whole [count]."""
        self.is_closed = False
        """Whether all run whole."""
        _all.add(self)
        self._name = name
        self._module = cutting.module.get_submodule(name)
        self._template = template
        self._layout = layout
        # Read once: a look at parameters in a forward gathers them under ZeRO-3, and one rank may prove while the others wait.
        self._devices = list(dict.fromkeys(tensor.device for tensor in self._module.parameters()))
        self._device = next(iter(self._devices), torch.device("cpu"))
        # What each rank has a part of; parts inside of this one have cut some.
        self._shards = {name_below(name, path) for path in cutting.layout.cuts if is_inside(path, name)}
        self._group = cutting.group
        self._attributes = cutting.attributes
        self._model = cutting.module
        self._proven = set(layout.proven.get("", ()))
        # In one order on all ranks.
        self._proven_kinds = sorted({signatures.kind_of_text(text) for text in self._proven})
        self._kinds: list[signatures.Kind] = list(self._proven_kinds)
        self._verdicts: dict[str, dict[Any, bool]] = {}
        self._known: dict[Any, bool] = {}
        self._structure = ""
        self._snapshot = signatures.StructureSnapshot(self._module)
        self._read_structure()

    def refresh(self) -> None:
        """Take over attributes, modes and hooks that have changed since the last step."""
        if not self._snapshot.is_current():
            self._snapshot = signatures.StructureSnapshot(self._module)
            self._read_structure()

    def _read_structure(self) -> None:
        pairs = list(zip(self._module.modules(), self._template.modules(), strict=False))
        for live, twin in pairs:
            _take_over(live, twin, {key: full for (owner, key), full in self._attributes.items() if owner == id(live)})
        memo: dict[int, Any] = {id(live): twin for live, twin in pairs}
        for live, twin in pairs:
            for own, theirs in ((live._parameters, twin._parameters), (live._buffers, twin._buffers)):
                memo |= {id(value): theirs[name] for name, value in own.items() if value is not None and name in theirs}
        rebind(self._template, memo)
        self._structure = digest(signatures.describe_structure(self._template))
        self._known = self._verdicts.setdefault(self._structure, {})

    def _take_over_numbers(self) -> None:
        """Copy the buffers' present values into the template; of a cut buffer no rank has all of them."""
        for (name, live), twin in zip(self._module.named_buffers(), self._template.buffers(), strict=False):
            if name not in self._shards and not isinstance(live, WrapperTensor):
                twin.data = live.detach().clone()
        for live, twin in zip(self._module.modules(), self._template.modules(), strict=False):
            vars(twin).update({name: value.detach().clone() for name, value in _tensors_of(live).items()})

    def allows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether shards are proven to equal the whole for this call. All ranks call it and get the same answer."""
        if self.is_closed:
            return False
        if _is_watched():
            self._note("a TorchFunctionMode of the user's is in force, and would see slices")
            return False
        with without_function_modes():  # a pipeline's stage would take what is asked here for the model's own code
            verdict = self._is_proven(args, kwargs, current_ambient())
        self.num_denied += not verdict
        return verdict

    def draws_in(self, module: nn.Module) -> bool:
        """Tell whether this part is one of a model's, and drops entries."""
        return self._model is module and any(part.drops for part in (*self._layout.regions, *self._layout.chains))

    def _is_proven(self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient) -> bool:
        for kind in self._kinds:
            verdict = self._known.get(self._signature(args, kwargs, kind, ambient))
            if verdict is not None:
                return verdict
        kind = self._proven_kind(args, kwargs, ambient)
        verdict = True
        if kind is None:
            verdict, kind = self._prove(args, kwargs, ambient)
        call = self._signature(args, kwargs, kind, ambient)
        if call is not None:
            self._known[call] = verdict
            self._kinds = [kind, *(other for other in self._kinds if other != kind)]  # the case of most calls
        return verdict

    def _proven_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient) -> signatures.Kind | None:
        """Return the kind under which the search has proven this call; None where a rank is not sure, and all prove it again."""
        if not self._proven_kinds:
            return None
        calls = [self._signature(args, kwargs, kind, ambient) for kind in self._proven_kinds]
        known = [
            call is not None and f"{'+'.join(kind[0])}:{digest((self._structure, *call))}" in self._proven
            for kind, call in zip(self._proven_kinds, calls, strict=True)
        ]
        told = torch.tensor(known, dtype=torch.int32, device=self._device)
        self._group.all_reduce(told, "min")
        return next((kind for kind, is_known in zip(self._proven_kinds, told.tolist(), strict=True) if is_known), None)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: signatures.Kind, ambient: Ambient) -> Any:
        """Return a call's signature and its kind, which says which sizes count and whether values do; None where it has none."""
        call = signatures.signature(args, kwargs, kind=kind, ambient=ambient)
        if call is None or not kind[1]:
            return None if call is None else (kind, call)
        # What the shards hold of a buffer is each rank's own: only what all have alike may decide.
        whole = [buffer for name, buffer in self._module.named_buffers() if name not in self._shards]
        if kind[1] > 1:
            whole += [value for child in self._module.modules() for value in _tensors_of(child).values()]
        return kind, (call, tuple(map(signatures.numbers_of, whole)))

    def _prove(self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient) -> tuple[bool, signatures.Kind]:
        """Return whether the call is proven, for which sizes, and whether only for these values."""
        names = signatures.names_of_sizes(args, kwargs)
        if not self._all_have(len(names)):
            self._note("ranks give it tensors of other sizes: what is cut before it reaches into it")
            return False, (tuple(names.values()), 2)
        reason = f"{MAX_PROOFS} kinds of calls were proven, and there are ever new ones"
        sizes, values, is_anothers = set(names), 2, False
        elsewhere = self._tensors_elsewhere(args, kwargs)
        if not all(tensor.is_floating_point() for tensor in elsewhere):
            reason = "it takes indices, a mask or complex numbers that another pipeline stage computes"
        elif self.num_proofs < MAX_PROOFS:
            self.num_proofs += 1
            is_anothers = self._is_alike(args, kwargs, ambient, names) and self._group.group_rank > 0
            # Nothing against it here: the first rank's word decides.
            found = ("", set[int](), 0) if is_anothers else self._try(args, kwargs, ambient, set(names))
            reason, sizes, values = found
        counts = [size not in sizes for size in names]
        told = torch.tensor([not reason, -values, *counts], dtype=torch.int32, device=self._device)
        self._group.all_reduce(told, "min")
        is_proven, least, *any_size = told.tolist()
        if not is_proven:
            reason = self._try(args, kwargs, ambient, set(names))[0] if is_anothers else reason
            self._note(reason or "another rank could not prove it")
        exact = tuple(name for name, is_any in zip(names.values(), any_size, strict=True) if not is_any)
        return bool(is_proven), (exact, -least)

    def _all_have(self, number: int) -> bool:
        """Tell whether all ranks have the same number."""
        told = torch.tensor([number, -number], dtype=torch.int64, device=self._device)
        self._group.all_reduce(told, "min")
        return told.tolist() == [number, -number]

    def _is_alike(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient, names: Mapping[int, str]
    ) -> bool:
        """Tell whether this call is the same on all ranks, numbers included: they would all run the same proof, and one does."""
        exact = self._signature(args, kwargs, (tuple(names.values()), 2), ambient)
        own = 0 if exact is None else (int(digest((self._structure, exact)), 16) >> 2) + 1
        return self._all_have(own) and own != 0

    def _try(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient, sizes: set[int]
    ) -> tuple[str, set[int], int]:
        """Return why a call is not proven (or ""), which sizes count, and whether values do, as found on this rank."""
        elsewhere = self._tensors_elsewhere(args, kwargs)
        self._take_over_numbers()
        given = map_tensors((args, kwargs), _for_proof)
        call = Call(args=given[0], kwargs=given[1], ambient=ambient)
        # In a thread of its own, where this thread's modes and autograd's hooks are not in force.
        with self._undisturbed(), memory_kept(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            reason, sizes, values, is_same = pool.submit(self._why_not, call, sizes).result()
        if values and not (reason or all(tensor.requires_grad for tensor in elsewhere)):
            reason, values = "it reads values, and another pipeline stage computes some that it may read", 2
        if not (reason or is_same or torch.is_grad_enabled()):
            reason = "it computes something else where gradients are off"
        return reason, sizes, values

    def _tensors_elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that a call may use and that another pipeline stage computes: here they have no values."""
        held = [value for child in self._module.modules() for value in vars(child).values()]
        tensors = (*tensors_in((args, kwargs)), *self._module.buffers(), *held)
        return [tensor for tensor in tensors if isinstance(tensor, WrapperTensor)]

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            name = self._name or "the model"
            _log.warning("'%s' runs whole on %d ranks for such a call: %s", name, self._group.size, reason)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore what a proof may reach in the model itself, through a hook of the part."""
        buffers = BufferSnapshot(self._model)
        try:
            with no_cached_tensors(self._model), kept_random_states(set(self._devices), module=self._model):
                yield
        finally:
            buffers.restore()

    def _why_not(self, call: Call, sizes: set[int]) -> tuple[str, set[int], int, bool]:
        """Return why a call is not proven (or ""), which sizes count, whether values do, and whether gradients change nothing."""
        try:
            experiment = Experiment(self._template, call, self._group.size)
            for layout in self._layouts():
                self._check(experiment, layout)
            asked = experiment.asks(resizes=self._layout.resizes)
            return "", asked.sizes, asked.values, asked.is_same
        except DisprovedError as error:
            return error.message, sizes, 2, True
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises on random numbers
            return f"it cannot be run by itself, which a proof needs: {in_words(error)}", sizes, 2, True

    def _layouts(self) -> Sequence[TensorLayout]:
        """Return the layout for each dim along which the stream may be sliced."""
        chains = self._layout.chains
        if not chains:
            return [self._layout]
        return [self._layout.replace(chains=(chain.replace(dims=(dim,)),)) for chain in chains for dim in chain.dims]

    def _check(self, experiment: Experiment, layout: TensorLayout) -> None:
        found, known = set(experiment.check(layout)), layout.partial
        for name in sorted(found - known):
            raise DisprovedError(f"each rank has only a term of the gradient of {name}, which was whole before")
        for name in sorted(known - found):
            gradient = experiment.whole.gradients.get(name)
            if gradient is not None and bool(gradient.any()):
                raise DisprovedError(f"every rank has the whole gradient of {name}, of which it had a term before")


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module keeps in attributes, except activations."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.requires_grad and not isinstance(value, _WITHOUT_NUMBERS)
    }


def _is_watched() -> bool:
    """Tell whether user code sees each function call; modes of torch and of this package may."""
    mode = current_function_mode()
    return mode is not None and not type(mode).__module__.startswith(("torch.", "meshwright."))


def _for_proof(tensor: Tensor) -> Tensor:
    """Return a plain tensor for the proof; one in slices, or of another stage, is an activation: only its shape counts."""
    if isinstance(tensor, WrapperTensor):
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        with draws_untouched():
            drawn = torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(20261))
        return drawn.to(tensor.dtype).requires_grad_(tensor.requires_grad)
    if not isinstance(tensor, Slices):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.is_floating_point())


def _take_over(live: nn.Module, twin: nn.Module, of_whole: Mapping[str, Any]) -> None:
    """Give a copy the attributes that the module has now, and the hooks registered since."""
    own = vars(twin)
    for name, value in vars(live).items():
        is_tensor = isinstance(value, Tensor)
        if name in OWN or isinstance(value, nn.Module) or (is_tensor and isinstance(own.get(name), Tensor)):
            continue
        value = _for_proof(value) if isinstance(value, WrapperTensor) else value
        own[name] = of_whole.get(name, value.detach().clone() if is_tensor else value)
    twin.training = live.training
    twin._is_full_backward_hook = live._is_full_backward_hook
    for kind in (*signatures.HOOKS, *_HOW_HOOKS_RUN):
        entries = {key: entry for key, entry in getattr(live, kind).items() if not is_ours(entry)}
        getattr(twin, kind).clear()
        getattr(twin, kind).update(entries)
