from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.strategies import plans

from meshwright.errors import ConfigError
from meshwright.spec import Plan, Prediction, TimeBreakdown
from meshwright.spec.plan_text import PRESETS


@given(plans())
def test_the_line_reads_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(str(plan), plan.num_devices) == plan
    assert str(Plan.parse(str(plan))) == str(plan)
    assert " " not in str(plan)


@given(plans(details=True))
@settings(max_examples=50)
def test_json_pickle_and_replace_keep_everything(plan: Plan) -> None:
    for copy in (Plan.from_json(plan.to_json(indent=2)), pickle.loads(pickle.dumps(plan)), plan.replace()):
        assert copy == plan
        assert (copy.hash, hash(copy)) == (plan.hash, hash(plan))
        assert (copy.reasons, copy.prediction) == (plan.reasons, plan.prediction)


@given(plans(), plans())
def test_plans_are_equal_where_their_hashes_are(first: Plan, second: Plan) -> None:
    assert (first == second) == (first.hash == second.hash)


@given(plans())
def test_mesh_ranks_and_devices_agree(plan: Plan) -> None:
    assert plan.mesh.world_size == plan.num_devices == plan.dp * plan.tp * plan.pp * plan.cp
    assert plan.num_ranks == (plan.num_devices if plan.mode == "ranks" else 1)
    assert plan.num_stages == plan.pp * plan.virtual
    assert plan.dp % plan.shard_degree == 0


def attempt(line: str, num_devices: int | None) -> tuple[Plan | None, ConfigError | None]:
    """Return the plan or the error; any other exception is a failure."""
    try:
        return Plan.parse(line, num_devices), None
    except ConfigError as error:
        return None, error


NUMBERS = st.integers(-2, 5)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(-2, 9), NUMBERS)
@example(-1, 0, -1, 1, 1, 3, 1)
@example(2, 1, 2, 1, 1, 3, 1)
def test_any_degrees_use_exactly_the_devices_or_are_a_config_error(
    dp: int, zero: int, tp: int, pp: int, cp: int, num_devices: int, shard: int
) -> None:
    # Case E074: nasty mesh errors, or devices left idle in silence.
    line = f"dp={dp},zero={zero},tp={tp},pp={pp},cp={cp},shard={shard}"
    plan, error = attempt(line, num_devices)
    if plan is None:
        assert re.search(r"\d", str(error))
    else:
        assert plan.num_devices == num_devices == dp * tp * pp * cp


@given(
    st.sampled_from(sorted(PRESETS)), st.integers(1, 300), st.dictionaries(st.sampled_from(["dp", "tp", "pp"]), NUMBERS)
)
def test_any_preset_uses_exactly_the_devices_or_is_a_config_error(
    name: str, num_devices: int, degrees: dict[str, int]
) -> None:
    line = ",".join([name, *(f"{axis}={degree}" for axis, degree in degrees.items())])
    try:
        plan = Plan.parse(line, num_devices)
    except ConfigError:
        assert degrees or name == "single"
    else:
        assert plan.num_devices == num_devices
        assert all(getattr(plan, axis) == degree for axis, degree in degrees.items())


@given(st.text(max_size=20) | st.text("dptpz=,1 -", max_size=20), st.none() | st.integers(-1, 4))
def test_any_text_is_a_plan_or_a_config_error(text: str, num_devices: int | None) -> None:
    plan, error = attempt(text, num_devices)
    assert (plan is None) != (error is None)


@given(plans(), st.integers(1, 32))
def test_the_fix_for_a_wrong_number_of_devices_works(plan: Plan, num_devices: int) -> None:
    parsed, error = attempt(str(plan), num_devices)
    if error is None:
        assert parsed == plan
        return
    assert error.fix is not None
    assert f"{plan.num_devices} device" in error.message
    assert str(num_devices) in error.message
    line = re.search(r"'(.*)'", error.fix)
    devices = re.search(r"(\d+) devices?$", error.fix)
    assert devices is not None
    assert Plan.parse(str(plan), int(devices[1])) == plan
    if line is not None:
        assert Plan.parse(line[1], num_devices).num_devices == num_devices


@pytest.mark.parametrize(
    ("line", "num_devices", "expected"),
    [
        ("single", None, Plan()),
        ("single", 1, Plan()),
        (
            "dp=2,tp=2,pp=2,zero=1,micro_batches=8,schedule=1f1b",
            8,
            Plan(dp=2, tp=2, pp=2, zero=1, micro_batches=8),
        ),
        ("distributed,micro_batches=2", 4, Plan(dp=4, micro_batches=2)),
        ("distributed", None, Plan()),
        ("distributed,tp=2", 8, Plan(dp=4, tp=2)),
        ("data_parallel,dp=3", None, Plan(mode="data_parallel", dp=3)),
        ("data_parallel", 2, Plan(mode="data_parallel", dp=2)),
        ("mode=data_parallel,dp=2", 2, Plan(mode="data_parallel", dp=2)),
        ("model_parallel", 3, Plan(mode="model_parallel", pp=3)),
        ("zero3", 4, Plan(dp=4, zero=3)),
        ("tensor", 2, Plan(tp=2)),
        ("pipeline", 4, Plan(pp=4, micro_batches=8)),
        ("pipeline,micro_batches=3,schedule=zbv", 2, Plan(pp=2, micro_batches=3, schedule="zbv", virtual=2)),
        ("hybrid", 2, Plan(tp=2)),
        ("hybrid", 4, Plan(tp=2, pp=2, micro_batches=4)),
        ("hybrid", 8, Plan(tp=2, pp=2, dp=2, micro_batches=4)),
        ("hybrid", 12, Plan(tp=2, pp=2, dp=3, micro_batches=4)),
        ("hybrid,tp=4", 8, Plan(tp=4, pp=2, micro_batches=4)),
        ("hybrid", 1024, Plan(tp=8, pp=8, dp=16, micro_batches=16)),
        (" dp = 2 , overlap = off ", 2, Plan(dp=2, overlap=False)),
        ("bucket_bytes=25MiB,micro_batch_size=4", None, Plan(bucket_bytes=25 * 2**20, micro_batch_size=4)),
    ],
)
def test_lines_and_presets(line: str, num_devices: int | None, expected: Plan) -> None:
    assert Plan.parse(line, num_devices) == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_works_on_one_device(name: str) -> None:
    assert Plan.preset(name, 1).num_devices == 1
    assert Plan.preset(name) == Plan.preset(name, 1)


def test_one_device_distributed_is_single() -> None:
    assert str(Plan.preset("distributed", 1)) == "single"


def test_auto_without_a_model_equals_distributed_and_says_who_plans() -> None:
    plan = Plan.preset("auto", 4)
    assert "make_plans" in plan.reasons[0]
    assert plan == Plan.preset("distributed", 4)
    assert plan.hash == Plan.preset("distributed", 4).hash


@pytest.mark.parametrize(
    ("line", "message", "fixed"),
    [
        ("dp=6,shard=4,zero=1", "shard divides dp", "shard=2"),
        ("dp=4,shard=2", "shard says where ZeRO shards", "zero=1"),
        ("pp=2,schedule=interleaved", "a rank has several stages", "virtual=2"),
        ("pp=2,schedule=zbv,virtual=3", "a rank has two stages", "virtual=2"),
        ("schedule=zb-h1", "pp is at least 2", "schedule=1f1b"),
        ("pp=2,virtual=2", "only interleaved and zbv", "virtual=1"),
        ("dp=0", "dp is at least 1", "dp=1"),
        ("zero=5", "zero is 0, 1, 2 or 3", "zero=3"),
        ("sequence_parallel=on", "it splits over tp", "sequence_parallel=off"),
    ],
)
def test_each_rule_has_a_fix_that_works(line: str, message: str, fixed: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Plan.parse(line)
    assert caught.value.fix == fixed
    key = fixed.partition("=")[0]
    kept = [word for word in line.split(",") if not word.startswith(f"{key}=")]
    assert Plan.parse(",".join([*kept, fixed]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dpp=2", r"unknown key 'dpp' \(did you mean 'dp'"),
        ("micro_batch=2", r"did you mean 'micro_batches'"),
        ("fsdp=1", r"(?s)unknown key 'fsdp'; known.*fix: write 'dp=1,zero=3'"),
        ("ddp=2,tp=2", r"fix: write 'dp=2,tp=2'"),
        ("distribute", r"unknown preset 'distribute' \(did you mean 'distributed'\?\)"),
        ("dp2", r"unknown preset 'dp2'(?s:.*)fix: write 'dp=2'"),
        ("dp:2", r"unknown preset 'dp:2'(?s:.*)fix: write 'dp=2'"),
        ("fsdp", r"unknown preset 'fsdp'(?s:.*)fix: write 'zero3'"),
        ("DDP,micro_batches=2", r"unknown preset 'DDP'(?s:.*)fix: write 'distributed,micro_batches=2'"),
        ("dp=2 tp=2 zero=1", r"commas separate keys(?s:.*)fix: write 'dp=2,tp=2,zero=1'"),
        ("zero1 dp=2", r"a preset stands alone before a comma: 'zero1,...'"),
        ("DP=2", r"did you mean 'dp'"),
        ("tp16,zero=1", r"fix: write 'tp=16,zero=1'"),
        ("dp=2,distributed", "a preset comes first: 'distributed,...'"),
        ("dp=2,dp=2", "'dp' is given twice"),
        ("pp=2,schedule=1f1", r"did you mean '1f1b'"),
        ("precision=fp16", "must be one of fp32, bf16"),
        ("dp=two", "must be a whole number"),
        ("dp=1.5", "must be a whole number"),
        ("dp=", "must be a whole number"),
        ("overlap=maybe", "must be on or off"),
        ("bucket_bytes=big", "must be a size"),
        ("dp=2,", "an empty entry"),
        ("", "the text is empty"),
        ("mode=data_parallel,tp=2", "its only degree is dp"),
        ("model_parallel,dp=2", "its only degree is pp"),
        ("data_parallel,zero=1", "zero needs one process per device"),
        ("zero1,zero=2", "which means zero=1"),
        ("single,dp=2", "which means dp=1"),
    ],
)
def test_mistakes_are_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.parse(line)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*'dpp'.*'tp' is given twice.*zero='x'"):
        Plan.parse("dpp=2,tp=1,tp=2,zero=x")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*dp=0.*tp=-1"):
        Plan(dp=0, tp=-1)


@pytest.mark.parametrize("num_devices", [0, -1, True, 1.5, "2"])
def test_impossible_numbers_of_devices(num_devices) -> None:
    with pytest.raises(ConfigError, match="num_devices="):
        Plan.parse("distributed", num_devices)


def test_preset_takes_a_name_only() -> None:
    with pytest.raises(ConfigError, match="not a preset's name"):
        Plan.preset("dp=2", 2)


@pytest.mark.parametrize("fields", [{"dp": "2"}, {"dp": 2.0}, {"dp": True}, {"overlap": 1}, {"stages": {"a": "0"}}])
def test_fields_of_the_wrong_type_are_config_errors(fields) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Plan(**fields)


def test_stages_must_exist() -> None:
    assert Plan(pp=2, schedule="zbv", stages={"head": 3}).stages["head"] == 3
    with pytest.raises(ConfigError, match=r"stages\['head'\]=4"):
        Plan(pp=2, schedule="zbv", stages={"head": 4})


def test_what_means_the_same_is_the_same() -> None:
    assert Plan(dp=4, zero=1, shard=4) == Plan(dp=4, zero=1)
    assert Plan(tp=2, sequence_parallel=True) == Plan(tp=2)
    assert Plan(pp=2, schedule="zbv") == Plan(pp=2, schedule="zbv", virtual=2)
    assert Plan(tp=2).uses_sequence_parallel
    assert not Plan(tp=2, sequence_parallel=False).uses_sequence_parallel


def test_another_schedule_drops_the_stages_that_zbv_implies() -> None:
    zbv = Plan(pp=2, schedule="zbv")
    assert zbv.replace(schedule="1f1b").virtual == 1
    assert zbv.replace(schedule="interleaved").virtual == 2
    with pytest.raises(ConfigError, match=r"unknown field 'dpp'"):
        zbv.replace(dpp=2)


def test_reasons_and_prediction_are_no_part_of_the_plan() -> None:
    explained = Plan(dp=2, reasons=("because",), prediction=Prediction(time=TimeBreakdown(forward_s=1.0)))
    assert explained == Plan(dp=2)
    assert explained.hash == Plan(dp=2).hash
    assert Plan(dp=2, layouts={"w": "column"}).hash != Plan(dp=2).hash


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from meshwright.spec import Plan; print(Plan(dp=2, layouts={'b': 'row', 'a': 'column'}).hash)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == Plan(dp=2, layouts={"a": "column", "b": "row"}).hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"dp"', '"dpp"'), r"unknown key 'dpp' \(did you mean"),
        (("meshwright.plan", "meshwright.model"), "the format is 'meshwright.model'"),
        (('"version": 1', '"version": 2'), "version 2 cannot be read"),
        (('"version": 1', '"version": true'), "version True cannot be read"),
        (('"dp": 1', '"dp": null'), "dp must be a whole number"),
        (("{", "["), "not JSON"),
    ],
)
def test_damaged_json_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(Plan().to_json().replace(*change, 1))


def test_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        Plan.from_json("[]")


def test_whole_batches_are_a_word_of_plans_with_dp() -> None:
    plan = Plan.parse("dp=4,zero=2,batch=whole")
    assert (str(plan), plan.num_shares, Plan.parse("dp=4").num_shares) == ("dp=4,zero=2,batch=whole", 1, 4)
    assert str(Plan.parse("dp=1,tp=2,batch=whole")) == "tp=2"
    assert str(Plan.parse("dp=2,batch=auto")) == "dp=2"
    assert str(Plan.parse("dp=2,batch=split")) == "dp=2,batch=split"
    assert str(Plan.parse("data_parallel,dp=2,batch=split")) == "mode=data_parallel,dp=2"
    with pytest.raises(ConfigError, match="batch is 'half', must be one of auto, split, whole"):
        Plan.parse("dp=2,batch=half")
    with pytest.raises(ConfigError, match="mode=data_parallel with batch=whole"):
        Plan.parse("data_parallel,dp=2,batch=whole")
