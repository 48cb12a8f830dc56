"""Imports of torch names that are not documented as public; no other module has any. Checked on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.library
import torch.profiler
import torch.utils.checkpoint
import torch.utils.data
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import _engine_run_backward
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "ATTENTIONS",
    "DEAR_OPERATORS",
    "GLOBAL_MODULE_HOOKS",
    "GROUPED_MM",
    "LINEAR",
    "MODULE_CALL",
    "PIN_MEMORY",
    "RECURRENCES",
    "RNN_LAYER",
    "TURNS",
    "WEIGHT_NORM",
    "Convolution",
    "FakeTensor",
    "FakeTensorError",
    "PlainCheckpoints",
    "ProcessGroupGloo",
    "TorchDispatchMode",
    "WrapperTensor",
    "cached_weights_of",
    "compile_cuda",
    "cpu_backend",
    "cpu_backend_name",
    "current_function_mode",
    "default_store",
    "detach_with_version",
    "exchanges_by_gloo_alone",
    "fake_mode_without_addresses",
    "foreach_add_",
    "foreach_mul_",
    "foreach_norm",
    "is_in_backward",
    "is_in_loose_checkpoint",
    "keep_forever",
    "leave_to_interpreter",
    "new_profiler",
    "num_users",
    "offer_monitored_barrier",
    "pytree",
    "recorded_shape",
    "run_backward",
    "set_version",
    "set_worker_info",
    "storage_id",
    "unsafe_sparse",
    "without_cached_weights",
    "without_dispatch_modes",
    "without_function_modes",
    "without_function_subclasses",
    "without_view",
]

_INTERPRETED: set[str] = set()
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
Convolution = torch.nn.modules.conv._ConvNd  # pyright: ignore[reportPrivateImportUsage]
"""The base of torch's convolution layers."""
_modules = torch.nn.modules.module
GLOBAL_MODULE_HOOKS: tuple[dict[int, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)
"""Hooks of all modules of this process, by their numbers: `torch.nn.modules.module.register_module_forward_hook` and the like."""

FakeTensorError = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What is raised where a fake tensor, which has a shape and no values, does not suffice."""
without_function_modes = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
without_function_subclasses = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
"""Contexts in which no TorchFunctionMode, and no tensor subclass's own `__torch_function__`, sees what is done."""

without_view = torch.ops.aten._unsafe_view.default
"""(tensor, shape) -> a result that lies in its memory and is no view of it to autograd: it may be written over."""


@contextlib.contextmanager
def without_cached_weights() -> Generator[None]:
    """Have parametrized weights made anew inside: torch's `parametrize.cached` around it knows modules by their ids alone."""
    kept, enabled = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = {}, 0
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = kept, enabled


@contextlib.contextmanager
def cached_weights_of(kind: str) -> Generator[None]:
    """Inside of torch's `parametrize.cached`, keep weights that are made of this kind of parameters apart from others."""
    outer: dict[Any, Any] = parametrize._cache
    if not parametrize._cache_enabled or outer.get("kind") == kind:
        yield
        return
    parametrize._cache = outer.setdefault(kind, {"kind": kind})
    try:
        yield
    finally:
        parametrize._cache = outer


def leave_to_interpreter(package: str) -> None:
    """Have torch.compile break its graphs at a package's code, and run that by the interpreter, if torch.compile is imported.

    Exchanges and their bookkeeping cannot be traced; the user's code that they call is compiled by itself.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and package not in _INTERPRETED:
        _INTERPRETED.add(package)
        rules.add(package)


def is_in_loose_checkpoint() -> bool:
    """Tell whether this code runs inside of torch.utils.checkpoint(..., preserve_rng_state=False)."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT and frame.f_locals.get("preserve") is False:
            return True
        frame = frame.f_back
    return False


def is_in_backward() -> bool:
    """Tell whether autograd's engine is running this thread: in hooks, and in forwards that a checkpoint repeats."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def recorded_shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape that a graph node expects of its gradient; None where it has none."""
    known = getattr(node, "_input_metadata", None)
    return tuple(map(int, known[0].shape)) if known else None


# A TorchFunctionMode sees not the called function, but the functions that it calls.
WEIGHT_NORM = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage] - what torch.nn.utils calls
PIN_MEMORY = torch.ops.aten._pin_memory
"""Copies a tensor into memory that a GPU reads directly."""

LINEAR = torch._C._nn.linear  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

unsafe_sparse = torch.ops.aten._sparse_coo_tensor_unsafe
"""(indices, values, shape) -> a sparse tensor. torch 2.11 and 2.12 warn where the public function is told to check nothing."""
TURNS = frozenset(
    {
        torch.t,
        torch.Tensor.t,
        torch.Tensor.T.__get__,  # pyright: ignore[reportAttributeAccessIssue]
        torch.Tensor.mT.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    }
)
"""What swaps the last two dims."""

without_dispatch_modes = _disable_current_modes
"""Context in which no TorchDispatchMode sees what is done: selective recompute counts the operators of a layer."""

# One call for a list of tensors; torch's own optimizers and clipping are written with them.
foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

_ATEN = torch.ops.aten
_FUSED_ATTENTIONS = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN.convolution.default)
DEAR_OPERATORS = frozenset({*_PRODUCTS, *_FUSED_ATTENTIONS})
"""Matrix products, convolutions and attention: what selective recompute does not do twice."""
ATTENTIONS = _FUSED_ATTENTIONS | {_ATEN._scaled_dot_product_fused_attention_overrideable.default}
"""Attention in one call, which keeps no scores."""
GROUPED_MM = _ATEN._grouped_mm.default
"""Products of a group of rows each with a matrix of its own: experts."""
RNN_LAYER = _ATEN.mkldnn_rnn_layer.default
"""One direction of an LSTM's layer, over all time steps."""


def detach_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph that shares the version counter, also below autograd, as torch's checkpoint does."""
    key = torch._C.DispatchKey.ADInplaceOrView  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    with torch._C._SetExcludeDispatchKeyGuard(key, False):  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        return tensor.detach()


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's count of writes."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # pyright: ignore[reportAttributeAccessIssue]


def new_profiler(activities: set[torch.profiler.ProfilerActivity]) -> torch.profiler.profile | None:
    """Return a profiler that sees all threads of this process; None where another one runs, which two at once damage."""
    if torch.autograd.profiler._is_profiler_enabled:
        return None
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    return torch.profiler.profile(activities=activities, experimental_config=threads)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id that is equal for tensors that share memory, while one of them lives."""
    return tensor.untyped_storage()._cdata


def fake_mode_without_addresses() -> FakeTensorMode:
    """Return a mode whose tensors have shapes alone; real ones may be mixed in.

    Code that asks one for its address (a kernel of its own, DLPack, ctypes) gets a RuntimeError. By default torch only warns and
    gives 0, and where code writes there the process ends.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def num_users(tensor: torch.Tensor) -> int:
    """Return how many tensors, arrays and the like hold a tensor's memory [count]."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportAttributeAccessIssue] - one is `storage`


def set_worker_info(info: Any) -> None:
    """Make `torch.utils.data.get_worker_info` return this object in this process, a worker of a DataLoader."""
    torch.utils.data._utils.worker._worker_info = info  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


def run_backward(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Run torch.autograd.backward with every TorchFunctionMode in force, which torch disables during it."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class PlainCheckpoints:
    """Inside its context, torch.utils.checkpoint calls its function without checkpointing, where `is_wanted` returns True.

    Args:
        is_wanted: Called before each call.
        is_inside: Called when a call begins and when it ends.
    """

    def __init__(self, is_wanted: Callable[[], bool], is_inside: Callable[[bool], None]) -> None:
        self._is_wanted = is_wanted
        self._is_inside = is_inside
        self._kept: Any = None

    def __enter__(self) -> None:
        theirs = torch.utils.checkpoint
        self._kept = theirs._checkpoint_without_reentrant_generator, theirs.CheckpointFunction
        theirs._checkpoint_without_reentrant_generator = self._generator
        theirs.CheckpointFunction = self  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        theirs = torch.utils.checkpoint
        theirs._checkpoint_without_reentrant_generator, theirs.CheckpointFunction = self._kept

    def _generator(self, *args: Any, **kwargs: Any) -> Generator[None]:
        return self._noted() if self._is_wanted() else self._kept[0](*args, **kwargs)

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Replace the autograd function of a reentrant checkpoint."""
        if not self._is_wanted():
            return self._kept[1].apply(function, preserve, *args)
        # Without a gradient in its arguments, a reentrant checkpoint gives its parameters none either; torch only warns.
        has_gradients = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        self._is_inside(True)
        try:
            with torch.set_grad_enabled(has_gradients and torch.is_grad_enabled()):
                return function(*args)
        finally:
            self._is_inside(False)

    def _noted(self) -> Generator[None]:
        self._is_inside(True)
        try:
            yield
        finally:
            self._is_inside(False)


class WrapperTensor(torch.Tensor):
    """Base of tensors with a description and no memory: torch functions see them, kernels do not."""

    @classmethod
    def make(cls, shape: tuple[int, ...], **description: Any) -> Any:
        """Return one of this shape; `description` as for `torch.empty_strided`, and `strides`."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, **description)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue, reportAssignmentType]


def cpu_backend_name(group: ProcessGroup) -> str:
    """Return the name of the backend of a group's CPU tensors: "gloo", "shm", or "" without one."""
    backend = cpu_backend(group)
    return "" if backend is None else backend.name()


def cpu_backend(group: ProcessGroup) -> Any:
    """Return the backend object of a group's CPU tensors, or None."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def exchanges_by_gloo_alone(group: ProcessGroup) -> bool:
    """Tell whether gloo exchanges all of a group's tensors, on any device."""
    if cpu_backend_name(group) != "gloo":
        return False
    try:
        return group._get_backend(torch.device("cuda")).name() == "gloo"
    except RuntimeError:
        return True


def default_store() -> Any:
    """Return the store of torch.distributed's default group, or None."""
    try:
        return distributed_c10d._get_default_store()
    except (ValueError, RuntimeError):
        return None


def keep_forever(*objects: object) -> None:
    """Keep these alive forever: the destructor of a group waits for its exchanges."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def offer_monitored_barrier(backend: str) -> None:
    """Have `dist.monitored_barrier` take groups of this backend, too: torch's own asks for the name "gloo".

    Args:
        backend: The name that the groups were made with; those that got gloo in its place are taken as well.
    """
    torchs = distributed_c10d.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: datetime.timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if distributed_c10d._rank_not_in_group(group):
            return torchs(group, timeout, wait_all_ranks)
        chosen: Any = distributed_c10d._get_default_group() if group is None else group
        if f"cpu:{backend}" not in distributed_c10d.get_backend_config(chosen).split(","):
            return torchs(group, timeout, wait_all_ranks)
        limit = cpu_backend(chosen).options._timeout if timeout is None else timeout
        if not isinstance(limit, datetime.timedelta):
            limit = datetime.timedelta(seconds=limit)
        return chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    for module in (distributed_c10d, torch.distributed):
        vars(module)["monitored_barrier"] = monitored_barrier


MODULE_CALL = torch.nn.Module._call_impl.__code__  # pyright: ignore[reportPrivateImportUsage]
"""The code that calls a module's forward: a frame of it has the module as `self`."""
RECURRENCES = frozenset(layer.forward.__code__ for layer in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU))
"""The code of recurrent layers: a frame of it has what it was given as `orig_input`, a PackedSequence for one."""


def compile_cuda(source: str, name: str) -> Callable[..., None]:
    """Return a CUDA kernel of this device, compiled by NVRTC; called with `grid`, `block` and `args` (tensors, C ints)."""
    return torch.cuda._compile_kernel(source, name)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
