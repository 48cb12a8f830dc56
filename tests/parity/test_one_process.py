"""The plans of one process: replicas on threads, layers over devices, and no parallelism at all."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.parity import cases
from tests.parity.harness import Setting, pieces_of_replicas, reference, run_case
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing
from meshwright.measure.oracle import to_dtype

SETTINGS = (
    Setting(num_samples=7, micro_batches=1),
    Setting(num_samples=7, micro_batches=3, max_grad_norm=0.05),
    Setting(num_samples=3, micro_batches=1, max_grad_norm=0.05),
    Setting(num_samples=11, micro_batches=3),
)

# Models with fewer pieces than three, which cannot be spread over more devices than that.
NUM_LAYERS = {"tiny": 1, "odd_layouts": 1, "keywords": 1, "own_loss": 2, "recurrent": 2, "output": 2}


def _matrix() -> list[tuple[str, int, Setting]]:
    return [
        (name, num_devices, SETTINGS[(index + num_devices) % len(SETTINGS)])
        for index, name in enumerate(cases.CASES)
        for num_devices in (2, 3, 4)
    ]


@pytest.mark.parametrize(("name", "num_devices", "setting"), _matrix(), ids=str)
def test_data_parallel_equals_one_device(name: str, num_devices: int, setting: Setting) -> None:
    line, devices = f"mode=data_parallel,dp={num_devices}", ["cpu"] * num_devices
    if name == "old_weight_norm":
        # The hook's computed weight is no leaf, which torch cannot copy: refused, with the way out.
        with pytest.raises(mw.ApplyError, match=r"copy\.deepcopy failed.*weight_norm(.|\n)*use the plan 'distributed'"):
            run_case(name, line, setting, devices=devices)
        return
    testing.assert_parity(run_case(name, line, setting, devices=devices), reference(name, setting), FLOAT64)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_data_parallel_with_fewer_samples_than_devices(name: str) -> None:
    setting = Setting(num_samples=2)
    records = run_case(name, "mode=data_parallel,dp=3", setting, devices=["cpu"] * 3)
    testing.assert_parity(records, reference(name, setting), FLOAT64)


@pytest.mark.parametrize("name", cases.PIECEWISE)
def test_data_parallel_equals_one_device_that_takes_the_same_pieces(name: str) -> None:
    setting = Setting(num_samples=18, micro_batches=2)
    records = run_case(name, "mode=data_parallel,dp=2", setting, devices=["cpu"] * 2)
    expected = reference(name, setting, 2, cutting=pieces_of_replicas)
    testing.assert_parity(records, expected, FLOAT64, buffers=True)


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize(("index", "name"), list(enumerate(cases.CASES)))
def test_model_parallel_equals_one_device(index: int, name: str, num_devices: int) -> None:
    setting = SETTINGS[(index + num_devices) % len(SETTINGS)]
    line, devices = f"mode=model_parallel,pp={num_devices}", ["cpu"] * num_devices
    num_layers = NUM_LAYERS.get(name.split("_", maxsplit=1)[0] if name.startswith("output_") else name, num_devices)
    if num_layers < num_devices:
        with pytest.raises(mw.ApplyError, match=f"{num_layers} layers cannot be spread over {num_devices} devices"):
            run_case(name, line, setting, devices=devices)
        return
    testing.assert_parity(run_case(name, line, setting, devices=devices), reference(name, setting), FLOAT64)


@pytest.mark.parametrize("name", sorted(cases.PIECEWISE.keys() - {"moving_average"}))  # which is a single layer
def test_model_parallel_equals_one_device_that_takes_the_same_pieces(name: str) -> None:
    setting = Setting(num_samples=8, micro_batches=2)
    records = run_case(name, "mode=model_parallel,pp=2", setting, devices=["cpu"] * 2)
    testing.assert_parity(records, reference(name, setting, 1), FLOAT64, buffers=True)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "name", sorted({*cases.CASES, *cases.PIECEWISE} - {"sparse", "sparse_sums"})
)  # AdamW takes no sparse gradients
def test_single_is_plain_pytorch_bit_for_bit(name: str, max_grad_norm: float | None) -> None:
    # E072: with one device the same code runs, and not a bit changes, in float32 and with AdamW too.
    case = cases.find(name)
    batches = [to_dtype(batch, torch.float32) for batch in case.batches(6, 5)]
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    options = testing.StepOptions(optimizer=adamw, max_grad_norm=max_grad_norm)
    build = functools.partial(_build_float32, case.build)
    records = testing.plan_steps(build, mw.Plan.parse("single"), batches, case.loss_fn, options=options)
    expected = testing.oracle_steps(build, batches, case.loss_fn, optimizer=adamw, max_grad_norm=max_grad_norm)
    for record, plain in zip(records, expected, strict=True):
        # Our loss is the quotient in float64, torch's the one in float32.
        assert torch.tensor(record.loss, dtype=torch.float32) == torch.tensor(plain.loss, dtype=torch.float32)
        for name_, value in plain.parameters.items():
            assert torch.equal(record.parameters[name_], value), name_
        for name_, value in plain.buffers.items():
            assert torch.equal(record.buffers[name_], value), name_
        for name_, gradient in plain.gradients.items():
            got = record.gradients[name_]
            assert (got is None) == (gradient is None), name_
            if gradient is not None:
                assert got is not None
                assert torch.equal(got, gradient), name_


def _build_float32(build: object) -> torch.nn.Module:
    return build().float()  # type: ignore[operator]


@pytest.mark.parametrize("line", ["mode=data_parallel,dp=1", "mode=model_parallel,pp=1", "dp=1"])
def test_one_device_in_every_mode(line: str) -> None:
    setting = Setting(num_samples=7, micro_batches=3, max_grad_norm=0.05)
    records = run_case("gpt", line, setting, devices=["cpu"] if "mode" in line else None)
    testing.assert_parity(records, reference("gpt", setting), FLOAT64)
