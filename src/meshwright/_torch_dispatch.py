"""Operators that are replaced inside a context, at keys of torch's dispatcher; all others fall through them without a call.

Beside them a check of torch's in Python, which a context lifts, and what tells operators that libraries have registered.

Nothing here is documented as public by torch. Checked on torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.library
from torch._functorch import pyfunctorch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import forward_ad

__all__ = [
    "KeptBy",
    "SizeOfValuesError",
    "also_replace",
    "batches_of_one",
    "carries_tangents",
    "cudnn_rnn",
    "draws_intercepted",
    "draws_untouched",
    "intercept_draws",
    "is_fake_mode_on",
    "is_of_library",
    "is_transformed",
    "is_wrapped",
    "keep_results",
    "replace_draws",
    "run_once",
    "scripts_in_python",
    "watch_empty_attention",
    "without_transforms",
]

SizeOfValuesError = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where values decide a number, or the size of a result."""
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
_DEVICES = ("CPU", "CUDA", "Meta", "MPS", "XPU", "PrivateUse1", "QuantizedCPU", "QuantizedCUDA")


_registering = threading.RLock()


def run_once(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs once in this process; threads that come meanwhile wait (with `functools.cache` they run it)."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> None:
        with _registering:
            cached(*args)

    return call


def _with_kernels(keys: Sequence[str]) -> set[str]:
    """Return the names of all operators with a kernel at one of these keys."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    return {name for key in keys for name in registered(key)}


def _parts(name: str) -> tuple[str, str]:
    """Return the library and the operator of a full name."""
    library, _, operator = name.partition("::")
    return library, operator


class _DispatchKey:
    """A key of the dispatcher.

    Args:
        name: Torch's name of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Any = torch._C._parse_dispatch_key(name)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        self._set: Any = torch._C.DispatchKeySet(self.value)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        self._libraries: list[torch.library.Library] = []

    def replace(self, kernels: Mapping[str, Callable[..., Any]], with_keys: Mapping[str, Callable[..., Any]]) -> None:
        """Register kernels for operators, for good; those `with_keys` are given the keys of the call first."""
        rest = torch.library.Library("_", "IMPL", self.name)
        rest.fallback(torch.library.fallthrough_kernel)
        self._libraries.append(rest)
        self.add(kernels, with_keys)
        self._spare_higher_orders()

    def add(self, kernels: Mapping[str, Callable[..., Any]], with_keys: Mapping[str, Callable[..., Any]]) -> None:
        """Register kernels for more operators, for good; as for `replace`."""
        own = torch.library.Library("aten", "IMPL", self.name)
        for name, kernel in kernels.items():
            own.impl(name, kernel)
        for name, kernel in with_keys.items():
            own.impl(name, kernel, with_keyset=True)
        self._libraries.append(own)

    def _spare_higher_orders(self) -> None:
        """Have operators that take functions (a custom function under vmap, as masks of FlexAttention index) fall through.

        They are dispatched in Python, where a key that is included is taken for one that has a kernel.
        """
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(self.value)  # of those that are made later
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(self.value)

    def pass_by(self, kept: set[str]) -> None:
        """Have operators fall through that have a kernel for all devices (composite) beside those of devices, for good.

        At keys of devices, which this one is to torch, a fallback is not enough: such operators run the composite kernel before
        it, in place of the CPU's or the GPU's own. `layer_norm` then has other bits, and is several times slower. Operators that
        choose their device first would arrive at the fallthrough itself; their composite kernels are those that devices have.

        Args:
            kept: Names of operators that get kernels of their own at this key.
        """
        found = (_with_kernels(_COMPOSITE) & _with_kernels(_DEVICES)) - _with_kernels(("BackendSelect",)) - kept
        libraries = {
            space: torch.library.Library(space, "IMPL", self.name) for space in {_parts(name)[0] for name in found}
        }
        for name in found:
            space, operator = _parts(name)
            libraries[space].impl(operator, torch.library.fallthrough_kernel)
        self._libraries.extend(libraries.values())

    def is_included(self) -> bool:
        """Tell whether this thread's calls arrive at the kernels."""
        return torch._C._dispatch_tls_is_dispatch_key_included(self.value)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

    def include(self, wanted: bool) -> None:
        """Say whether this thread's calls, and those of autograd's threads for it, arrive at the kernels."""
        torch._C._dispatch_tls_set_dispatch_key_included(self.value, wanted)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

    def excluded(self) -> Any:
        """Return a context in which no call arrives at the kernels, whatever is included inside."""
        return torch._C._ExcludeDispatchKeyGuard(self._set)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


cudnn_rnn: Callable[..., Any] = torch._cudnn_rnn  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
"""Recurrent layers of a GPU; unlike the operator of this name it gives its warnings to the code that calls it."""

# Above autograd: torch sets it aside for modes written in C++. See docs/adr/0025-randomness.md.
_DRAWS = _DispatchKey("TESTING_ONLY_GenericMode")


def replace_draws(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Replace operators inside `draws_intercepted`, for good; `draws_untouched` runs torch's own.

    Args:
        kernels: The operator's name, with its overload, without "aten::" -> what runs for it.
    """
    # On a CPU attention draws by `dropout`, which is replaced itself; a call through Python takes as long as a small operator.
    _DRAWS.replace(kernels, {"scaled_dot_product_attention": _attention} if _is_of_gpu() else {})


def _is_of_gpu() -> bool:
    """Tell whether torch was built for a GPU, by which the driver is left alone, unlike by the question for a device."""
    others = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None), torch.backends.mps.is_built())
    return any(others)


def also_replace(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Replace more operators inside `draws_intercepted`, for good; as for `replace_draws`."""
    _DRAWS.add(kernels, {})


_on_empty: Callable[[tuple[int, ...]], object] | None = None


@run_once
def watch_empty_attention(note: Callable[[tuple[int, ...]], object]) -> None:
    """Have attention with dropout, but without heads, call this with the shape of its weights, for good.

    Torch returns before it drops out, so that a rank without a head would miss a draw which the other ranks count.

    Args:
        note: Called for each such attention inside of `draws_intercepted`.
    """
    global _on_empty
    _on_empty = note
    if not _is_of_gpu():
        _DRAWS.add({}, {"scaled_dot_product_attention": _attention})


def _attention(keys: Any, *given: Any, **options: Any) -> Any:
    """Run attention; with dropout on a GPU in operators of its own, since fused kernels draw by themselves."""
    operator = torch.ops.aten.scaled_dot_product_attention.default
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named: dict[str, Any] = dict(zip(names, given, strict=False)) | options
    query = named["query"]
    if named.get("dropout_p") and not query.numel() and _on_empty is not None:
        _on_empty((*map(int, query.shape[:-1]), int(named["key"].shape[-2])))
    if not named.get("dropout_p") or query.device.type == "cpu":
        return operator.redispatch(keys.remove(_DRAWS.value), *given, **options)
    return torch.ops.aten._scaled_dot_product_attention_math.default(**named)[0]


@contextlib.contextmanager
def draws_intercepted(wanted: bool) -> Generator[None]:
    """Run the operators of `replace_draws` inside the context, in this thread and in autograd's for it; or torch's own.

    Args:
        wanted: Whether they are replaced.
    """
    before = _DRAWS.is_included()
    _DRAWS.include(wanted)
    try:
        yield
    finally:
        _DRAWS.include(before)


def intercept_draws(wanted: bool) -> None:
    """Run the operators of `replace_draws`, or torch's own, in this thread from now on.

    Args:
        wanted: Whether they are replaced.
    """
    _DRAWS.include(wanted)


def draws_untouched() -> Any:
    """Return a context in which torch's own operators draw, whatever is asked for inside."""
    return _DRAWS.excluded()


@contextlib.contextmanager
def batches_of_one() -> Generator[None]:
    """Let norms of groups and instances run on one sample of one value for each group, which torch's modules refuse.

    Their operators give the same for such a sample as beside others, which they do not refuse.
    """
    functional: Any = torch.nn.functional
    before = functional._verify_batch_size
    functional._verify_batch_size = lambda *_: None
    try:
        yield
    finally:
        functional._verify_batch_size = before


def is_transformed() -> bool:
    """Tell whether a transform of torch.func (vmap, grad) runs the code."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


class _Inlining(threading.local):
    depth = 0


_inlining = _Inlining()


@contextlib.contextmanager
def scripts_in_python() -> Generator[None]:
    """Run the Python code of functions that `torch.jit.script` has compiled: torch functions inside are seen, as elsewhere."""
    _see_scripts()
    _inlining.depth += 1
    try:
        yield
    finally:
        _inlining.depth -= 1


@run_once
def _see_scripts() -> None:
    kind: Any = torch.jit.ScriptFunction
    compiled = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        written = getattr(self, "_torchdynamo_inline", None) if _inlining.depth else None
        return compiled(self, *args, **kwargs) if written is None else written(*args, **kwargs)

    kind.__call__ = call


def carries_tangents() -> bool:
    """Tell whether forward-mode derivatives are computed: tensors carry tangents beside their values."""
    return forward_ad._current_level >= 0


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a wrapper that a transform of torch.func has put around another one, without memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


@contextlib.contextmanager
def without_transforms() -> Generator[None]:
    """Run code as outside of transforms of torch.func, which would wrap each tensor that it makes."""
    if not is_transformed():
        yield
        return
    with pyfunctorch.temporarily_clear_interpreter_stack():
        yield


def is_fake_mode_on() -> bool:
    """Tell whether tensors that are made now have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


# Below autograd and the modes written in Python, above the kernels: autograd records the operator, whoever gives its result.
# Only random number generators of other kinds of device carry it. See docs/adr/0032-selective-recompute.md.
_RESULTS = _DispatchKey("CustomRNGKeyId")

Keeper = Callable[[Any, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]


class _Keepers(threading.local):
    """This thread's keeper, and the run of autograd's that it was called in."""

    def __init__(self) -> None:
        self.now: tuple[Keeper, int] | None = None


_keepers = _Keepers()


def keep_results(operators: Mapping[str, Any]) -> None:
    """Hand the calls of operators inside `KeptBy` to what keeps their results, for good.

    Args:
        operators: The operator's name, with its overload, without "aten::" -> the operator.
    """

    def kernel_of(operator: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return operator.redispatch(keys.remove(_RESULTS.value), *args, **kwargs)

            # A backward inside of the forward may run in another thread, where nobody keeps: so it is left alone in any.
            now = _keepers.now
            if now is None or now[1] != _autograd_run():
                return run()
            _keepers.now = None  # what a kernel calls is not called where its result is given
            try:
                return now[0](operator, run, args, kwargs)
            finally:
                _keepers.now = now

        return kernel

    _RESULTS.pass_by({f"aten::{name}" for name in operators})
    _RESULTS.replace({}, {name: kernel_of(operator) for name, operator in operators.items()})


def _autograd_run() -> int:
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


@contextlib.contextmanager
def kept_by_nobody() -> Generator[None]:
    """Hand no operator to a keeper inside the context, in this thread: what runs there is not the forward's own."""
    before, _keepers.now = _keepers.now, None
    try:
        yield
    finally:
        _keepers.now = before


class KeptBy:
    """A context that hands the operators of `keep_results` to a function, in this thread. It may be entered again later.

    Args:
        keeper: Called with the operator, a function that runs it, its arguments and keywords; returns its result.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._before: tuple[Keeper, int] | None = None

    def __enter__(self) -> None:
        self._before, _keepers.now = _keepers.now, (self._keeper, _autograd_run())
        _RESULTS.include(True)

    def __exit__(self, *error: object) -> None:
        _keepers.now, self._before = self._before, None
        _RESULTS.include(_keepers.now is not None)


def is_of_library(func: Any) -> bool:
    """Tell whether a function is an operator that a library beside torch has registered: `torch.ops.torchvision.nms`."""
    if type(func) is OpOverloadPacket:
        return not func._qualified_op_name.startswith("aten::")  # pyright: ignore[reportPrivateUsage]
    return type(func) is OpOverload and func.namespace != "aten"
