"""Description of any module: `describe_model`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright._torch_private import RNN_LAYER, FakeTensor, FakeTensorError
from meshwright.describe.batches import BatchSplitter, call_model, model_inputs
from meshwright.describe.cast_kernels import under_autocast
from meshwright.describe.fakes import (
    WritesConstantError,
    build_fake,
    fake_batch,
    fake_module,
    make_fake_mode,
    quiet,
    sized_batch,
    with_fake_tensors,
)
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.describe.layer_specs import LayerAssembly
from meshwright.describe.left_tensors import no_tensors_left
from meshwright.describe.module_facts import facts_of, kept_bytes, sequence_of
from meshwright.describe.ownership import layer_names, ownership_of
from meshwright.describe.per_sample import Samples, pick_samples
from meshwright.describe.recorder import ForwardRecorder
from meshwright.errors import ApplyError, ConfigError, MeshwrightError, UserCodeError
from meshwright.python_state import kept_python_state
from meshwright.spec.model import Autocast, ModelSpec
from meshwright.trees import map_tensors, tensors_in
from meshwright.units import format_bytes

__all__: list[str] = []

REAL_BYTES: Final = 1 << 30
"""Models of at most this size are run with values, where shapes alone do not suffice [bytes]."""

_log = logging.getLogger(__name__)


def describe_model(
    build_model: nn.Module | Callable[[], nn.Module],
    example_batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    sequence_length: int | None = None,
    autocast: Autocast = "none",
) -> ModelSpec:
    """Describe a model: layers in the order of their forward, with parameters, arithmetic, bytes and operators of one sample.

    Nothing is allocated and no weight is computed: the model is built and run on fake tensors. Where its forward needs values (a
    mask as an index, a branch on a number), a model of at most 1 GiB is run for real on the CPU, with the values of the example
    batch; ``notes`` says so. A module that is already built is copied, not changed.

    A layer's activation bytes are what autograd keeps on a CPU, each memory once, with the first layer that needs it; parameters
    and buffers are left out. FLOPs count products of matrices, convolutions and attention, whose causal half is not left out.

    Args:
        build_model: A function that returns the module, or the module.
        example_batch: A mapping (keywords), or a pair (inputs, targets); of its floating-point tensors only shapes and dtypes are
            read. The numbers of samples may be any.
        loss_fn: ``(outputs, batch)`` -> the loss, whose operators then belong to the last layer; None leaves it out, unless the
            model computes one itself.
        sequence_length: The size of dim 1 in the batch that is the sequence, where integer inputs do not tell [tokens].
        autocast: For plans with ``precision=bf16``: forward and loss run under autocast to bfloat16 as on "cuda" or "cpu"
            devices, whose lists of operators differ. Casts are operators, and each operator has its own dtype.

    Returns:
        The model, whose numbers are for one sample.

    Raises:
        ConfigError: The model cannot be built, or needs values and is too large, or the batch holds no samples.
        UserCodeError: The model's own code raised with real tensors, too.

    >>> spec = describe_model(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), (torch.zeros(2, 8),))
    >>> [(layer.name, layer.num_params, layer.forward_flops) for layer in spec.layers]
    [('0', 144, 256.0), ('1', 68, 128.0)]
    """
    num_samples = _count_samples(example_batch)
    sequence = _check_sequence(example_batch, sequence_length)
    if autocast not in ("none", "cpu", "cuda"):
        raise ConfigError(f"autocast={autocast!r} (rule: none, cpu or cuda)", fix='autocast="cuda"')
    job = _Attempts(build_model, example_batch, loss_fn, num_samples, autocast)
    with kept_python_state(), no_tensors_left(build_model, type(build_model), loss_fn):
        seen = job.run()
    parameters = ownership_of(seen.module, seen.layers)
    assembly = LayerAssembly(seen.recorder, seen.layers, parameters, seen.samples, is_cast=autocast != "none")
    layers, bonds = assembly.layers(), assembly.bonds()
    return ModelSpec(
        name=type(seen.module).__name__,
        layers=layers,
        shared=assembly.shared(),
        bonds=bonds,
        sequence_length=sequence,
        autocast=autocast,
        buffers_bytes=kept_bytes(seen.module),
        notes=(*seen.notes, *assembly.notes),
        **facts_of(seen.module, seen.recorder, seen.samples, parameters.shapes),
    )


def _count_samples(batch: Any) -> int:
    try:
        model_inputs(batch)
        count = BatchSplitter().count(batch)
    except ApplyError as error:
        raise ConfigError(
            f"the example batch: {error.message}",
            fix="make dim 0 the sample in every tensor of a mapping or a pair (inputs, targets), or give the batch an attribute "
            "num_samples",
        ) from error
    if count < 1:
        raise ConfigError(f"the example batch has {count} samples (rule: at least 1)", fix="give it one sample or more")
    return count


def _check_sequence(batch: Any, wanted: int | None) -> int | None:
    if wanted is None:
        return sequence_of(batch)
    sizes = sorted({tensor.shape[1] for tensor in tensors_in(batch) if tensor.dim() > 1})
    if wanted not in sizes:
        raise ConfigError(
            f"sequence_length={wanted}, but dim 1 of the batch's tensors is {sizes} (rule: it is one of them)",
            fix="leave sequence_length out, or give a batch of that length",
        )
    return wanted


@dataclasses.dataclass(kw_only=True)
class _Seen:
    """A forward that was recorded."""

    module: nn.Module
    layers: list[str]
    recorder: ForwardRecorder
    samples: Samples
    notes: list[str]


class _Attempts:
    """One description: tries to run on fake tensors, and then on real ones."""

    def __init__(
        self,
        build_model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        num_samples: int,
        autocast: Autocast,
    ) -> None:
        self._build_model = build_model
        self._batch = batch
        self._loss_fn = loss_fn
        self._num_samples = num_samples
        self._autocast: Autocast = autocast
        self._where = ""

    def run(self) -> _Seen:
        """Return the record of the first way that works."""
        mode = make_fake_mode()
        built, error = self._built_fake(mode)
        if built is not None:
            num_wanted = self._num_wanted(built)
            ways = [(num_wanted, True), (num_wanted, False), (self._num_samples, True)]
            module: nn.Module | None = built
            for count, constants in ways:
                try:
                    return self._run_fake(module or self._fake_module(mode), mode, count, constants=constants)
                except MeshwrightError:
                    raise
                except Exception as failure:  # noqa: BLE001 - the user's code, on tensors without values
                    error, module = failure, None  # a forward that failed may have left anything in its module
        return self._run_real(built, error)

    def _num_wanted(self, module: nn.Module) -> int:
        tensors = [*module.parameters(), *module.buffers()]
        sizes = {size for tensor in tensors for size in tensor.shape}
        sizes.update(size for tensor in tensors_in(self._batch) for size in tensor.shape[1:])
        is_divisible = any(tensor.dim() and tensor.shape[0] == self._num_samples for tensor in tensors_in(self._batch))
        is_plain = getattr(self._batch, "num_samples", None) is None
        return pick_samples(sizes) if is_divisible and is_plain else self._num_samples

    # -- without values -----------------------------------------------------------------------------------------

    def _built_fake(self, mode: Any) -> tuple[nn.Module | None, Exception | None]:
        try:
            return self._fake_module(mode), None
        except MeshwrightError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code, on tensors without values
            return None, error

    def _fake_module(self, mode: Any) -> nn.Module:
        given = self._build_model
        if isinstance(given, nn.Module):
            return _copied(given, mode)
        built, is_new = build_fake(given, mode)
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"build_model returned {type(built).__name__} (rule: an nn.Module)",
                fix="return the module that it builds",
            )
        return with_fake_tensors(built, mode) if is_new else _copied(built, mode)

    def _run_fake(self, module: nn.Module, mode: Any, count: int, *, constants: bool) -> _Seen:
        batch = fake_batch(sized_batch(self._batch, self._num_samples, count), mode, constants=constants)
        with (
            _untouched(self._build_model),
            no_cached_tensors(module),
            torch.random.fork_rng(devices=[]),
            quiet(),
            mode,
        ):
            seen = self._record(module, batch, constants=constants)
        tells = count != self._num_samples
        seen.samples = Samples(count=count, own=self._num_samples, tells=tells)
        if any(step.function == RNN_LAYER.__name__.partition(".")[0] for step in seen.recorder.steps):
            seen.notes.append(
                "the workspace that oneDNN's LSTM keeps for backward is not counted: shapes do not tell its size"
            )
        if not tells:
            seen.notes.append(
                f"run with the {count} samples of the example batch: what does not grow with them is counted as if it did"
            )
        return seen

    def _record(self, module: nn.Module, batch: Any, *, constants: bool) -> _Seen:
        layers = layer_names(module)
        recorder = ForwardRecorder(module, layers, constants=constants, is_cast=self._autocast != "none")
        with torch.enable_grad(), under_autocast(self._autocast):
            try:
                with recorder:
                    outputs = call_model(module, batch)
                    if self._loss_fn is not None:
                        recorder.where = "loss"
                        outputs = _tensors_of(self._loss_fn(outputs, batch))
                    recorder.finish(outputs)
            except Exception:
                self._where = recorder.where
                raise
        if list(recorder.calls) == [""]:
            layers = [""]
        return _Seen(
            module=module, layers=layers, recorder=recorder, samples=Samples(count=1, own=1, tells=False), notes=[]
        )

    # -- with values --------------------------------------------------------------------------------------------

    def _run_real(self, built: nn.Module | None, why: Exception | None) -> _Seen:
        where = f"'{self._where}'" if self._where else "the model itself"
        reason = _reason(why)
        size = None if built is None else sum(t.nbytes for t in (*built.parameters(), *built.buffers()))
        if size is not None and size > REAL_BYTES:
            raise ConfigError(
                f"{where} needs values, not shapes alone ({reason}), and the model has {format_bytes(size)} of parameters "
                f"and buffers (rule: at most {format_bytes(REAL_BYTES)} are run with values)",
                fix="describe the same model with fewer or smaller layers, or have that part decide by shapes",
            ) from why
        if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors_in(self._batch)):
            raise ConfigError(
                f"{where} needs values ({reason}), and the example batch has shapes alone",
                fix="give an example batch with values",
            ) from why
        module: nn.Module | None = None
        try:
            with _untouched(self._build_model), torch.random.fork_rng(devices=[]):
                module = (
                    copy.deepcopy(self._build_model)
                    if isinstance(self._build_model, nn.Module)
                    else self._build_model()
                )
                batch = map_tensors(self._batch, lambda tensor: tensor.detach().clone())
                seen = self._record(module, batch, constants=False)
        except Exception as error:
            ran = "the loss" if self._where == "loss" else "the model's code"
            what = "the code that builds the model" if module is None else ran
            raise UserCodeError(
                f"{what} raised {type(error).__name__}: {textwrap.shorten(str(error), 400)}",
                rank=0,
                traceback_text=traceback.format_exc(),
                fix="call it in one plain process first; in a configuration model.kwargs are its arguments"
                if module is None
                else "make the model run in one plain process with the example batch, then describe it",
            ) from error
        seen.samples = Samples(count=self._num_samples, own=self._num_samples, tells=False)
        seen.notes.append(
            f"{where} needs values, not shapes alone ({reason}): the model was run for real with the {self._num_samples} samples "
            "of the example batch, and other samples may take more or less"
        )
        return seen


def _copied(module: nn.Module, mode: Any) -> nn.Module:
    """Return a copy with fake tensors of a module that was there before."""
    scripted = next((child for child in module.modules() if isinstance(child, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ConfigError(
            f"a part of the model is a {type(scripted).__name__}, whose operators cannot be watched",
            fix="describe the module that torch.jit.script was given",
        )
    try:
        return fake_module(module, mode)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} is already built and cannot be copied ({type(error).__name__}: {error})",
            fix="pass a function that builds it",
        ) from error


def _reason(error: Exception | None) -> str:
    if isinstance(error, (*FakeTensorError, WritesConstantError)):
        return "it reads or indexes by a tensor's entries"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of a loss, which may be an object of its own."""
    return list(tensors_in(vars(result) if hasattr(result, "__dict__") and not isinstance(result, Tensor) else result))


@contextlib.contextmanager
def _untouched(module: Any) -> Iterator[None]:
    """Restore a given module afterwards: a forward that was replaced on an instance may close over it and run it."""
    if not isinstance(module, nn.Module):
        yield
        return
    kept = [
        (child, {k: dict(v) if isinstance(v, dict) else v for k, v in vars(child).items()})
        for child in module.modules()
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for child, attributes in kept:
            for name, value in attributes.items():
                present = vars(child).get(name)
                if isinstance(value, dict) and isinstance(present, dict):
                    present.clear()
                    present.update(value)
                else:
                    vars(child)[name] = value
            for name in vars(child).keys() - attributes.keys():
                del vars(child)[name]
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
