from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.strategies import models, predictions, records, trainings

from meshwright.errors import ConfigError
from meshwright.spec import LayerSpec, MemoryBreakdown, ModelSpec, Plan, Prediction, RunRecord, TimeBreakdown, TrainSpec
from meshwright.spec.model import SharedParameter
from meshwright.values import FrozenMap


@given(st.one_of(models(), trainings(), predictions(), records()))
def test_json_round_trip(value) -> None:
    copy = type(value).from_json(value.to_json())
    assert copy == value
    assert copy.hash == value.hash
    assert copy.to_json() == value.to_json()
    assert hash(copy) == hash(value)


@pytest.mark.parametrize(
    ("sizes", "num_params"),
    [
        # GPT-2 small: the sum over the published checkpoint's tensors (Hugging Face openai-community/gpt2).
        ({"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "sequence": 1024, "tied": True}, 124_439_808),
        # Llama 2 7B and Llama 3 8B: likewise, meta-llama/Llama-2-7b and meta-llama/Meta-Llama-3-8B.
        (
            {
                "layers": 32,
                "hidden": 4096,
                "heads": 32,
                "intermediate": 11008,
                "vocab": 32000,
                "sequence": 4096,
                "gated": True,
            },
            6_738_415_616,
        ),
        (
            {
                "layers": 32,
                "hidden": 4096,
                "heads": 32,
                "kv_heads": 8,
                "intermediate": 14336,
                "vocab": 128256,
                "sequence": 8192,
                "gated": True,
            },
            8_030_261_248,
        ),
    ],
)
def test_transformers_have_the_published_number_of_parameters(sizes, num_params: int) -> None:
    model = ModelSpec.transformer(**sizes)
    assert model.num_params == num_params
    assert model.params_bytes == 4 * num_params


def test_a_block_has_the_published_flops_and_activations() -> None:
    h, s, b = 512, 128, 2
    block = ModelSpec.transformer(layers=1, hidden=h, heads=8, vocab=100, sequence=s, element_bytes=b).layers[1]
    assert block.forward_flops == 24 * s * h**2 + 4 * s**2 * h  # Narayanan et al. 2021, appendix
    assert block.activation_bytes == (34 - 2) * s * h  # Korthikanti et al. 2022, eq. 1, without masks and 5 a s / h


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3}, "heads divide hidden"),
        ({"kv_heads": 3}, "kv_heads divide heads"),
        ({"layers": 0}, "layers=0"),
        ({"hidden": 1.5}, "hidden=1.5"),
        ({"head_size": 0}, "head_size=0"),
    ],
)
def test_impossible_transformers_are_refused(sizes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.transformer(**({"layers": 1, "hidden": 8, "heads": 2, "vocab": 4, "sequence": 4} | sizes))


def test_shared_parameters_count_once() -> None:
    layers = tuple(LayerSpec(name=name, num_params=10, params_bytes=40) for name in "abc")
    tied = SharedParameter(names=("a.w", "c.w"), layers=("a", "c"), num_params=6, params_bytes=24)
    model = ModelSpec(name="tied", layers=layers, shared=(tied,))
    assert (model.num_params, model.params_bytes) == (24, 96)


def test_a_model_reports_all_its_mistakes() -> None:
    layers = (
        LayerSpec(name="a", num_params=1),
        LayerSpec(name="a", num_params=1),
        LayerSpec(name="head", num_params=1),
    )
    tied = SharedParameter(names=("x", "y"), layers=("heads", "head"), num_params=5, params_bytes=20)
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*'a' is used 2 times.*did you mean 'head'.*only 1"):
        ModelSpec(name="m", layers=layers, shared=(tied,))
    with pytest.raises(ConfigError, match="no layers"):
        ModelSpec(name="m", layers=())


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainSpec(global_batch_size=0),
        lambda: TrainSpec(global_batch_size=1, optimizer="adamm"),
        lambda: TimeBreakdown(forward_s=-1.0),
        lambda: TimeBreakdown(forward_s=math.nan),
        lambda: MemoryBreakdown(buffers_bytes=-1),
        lambda: Prediction(mfu=1.5),
        lambda: Prediction(sent_bytes={"dp": -1}),
        lambda: LayerSpec(name="", num_params=-1),
        lambda: RunRecord(plan=Plan(), config={"x": object()}),
        lambda: RunRecord(plan=Plan(), config={"x": math.inf}),
        lambda: RunRecord.from_dict({}),
    ],
)
def test_impossible_values_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


@given(predictions())
def test_a_prediction_adds_up(prediction: Prediction) -> None:
    assert prediction.step_s == pytest.approx(math.fsum(prediction.time.to_dict().values()))
    assert prediction.peak_bytes == sum(prediction.memory.to_dict().values())
    assert 0 <= prediction.bubble_fraction <= 1


def test_a_record_compares_prediction_and_measurement() -> None:
    record = RunRecord.from_dict(
        {
            "plan": Plan(dp=2).to_dict(),
            "prediction": {"time": {"forward_s": 1.0}},
            "measurement": {"step_seconds": [2.0, 3.0, 2.0], "num_samples": 14, "num_tokens": 70},
        }
    )
    assert record.step_time_ratio == 2.0
    assert record.measurement is not None
    assert (record.measurement.samples_per_s, record.measurement.tokens_per_s) == (2.0, 10.0)
    assert RunRecord(plan=Plan()).step_time_ratio is None


def test_values_cannot_be_changed() -> None:
    train = TrainSpec(global_batch_size=1)
    with pytest.raises(AttributeError):
        train.global_batch_size = 2
    mapping = FrozenMap({"a": 1})
    with pytest.raises(TypeError):
        mapping["a"] = 2
    assert mapping == {"a": 1}
