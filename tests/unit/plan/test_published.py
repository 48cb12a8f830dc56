"""Published rows as setups: any row gets an answer or a reason, and BLOOM's plan is the one that its engineers found."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.planner import bloom, errors
from benchmarks.planner.evaluate import Judge, as_read, main
from benchmarks.planner.fields import cleaned
from benchmarks.planner.gpus import gpu_of
from benchmarks.planner.rows import cluster_of, model_of, setup_of
from benchmarks.planner.software import software_of

from meshwright.hardware import LinkSpec
from meshwright.plan.costs.step_costs import StepCosts

PLAN = (4, 12, 8, 2)
"""TP4 PP12 DP8, micro-batches of 2: BLOOM's, at 104.7 s a step (bigscience-workshop/bigscience, train/tr11-176B-ml)."""

STRANGE: tuple[Any, ...] = (
    None, 0, -1, 0.5, 1e30, 10**400, float("nan"), float("inf"), "", "words", "8", "1,024", "-3", [], {}, True, 7, "5 layers",
)  # fmt: skip


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def measured(**changes: Any) -> dict[str, Any]:
    row = bloom.row_of(*PLAN)
    row |= {"status": "ok", "usable_for": ["time", "memory"], "mem_kind": "nvidia-smi"}
    return row | {"measured": {"step_time_s": 104.7, "peak_mem_GB": 59.0}} | changes


def mutated(seed: int) -> dict[str, Any]:
    """Return a row of which some fields are missing, null or nonsense."""
    draw = random.Random(seed)
    row = measured(id=f"row {seed}")
    for _ in range(draw.randint(1, 3)):
        places: list[dict[str, Any]] = [row, *(part for part in row.values() if isinstance(part, dict) and part)]
        place = draw.choice(places)
        name = draw.choice(sorted(place))
        if draw.random() < 0.3:
            del place[name]
        else:
            place[name] = copy.copy(draw.choice(STRANGE))
    return row


def test_bloom_gets_the_plan_that_its_engineers_found() -> None:
    seconds, best = bloom.ranked()[0]
    assert best == PLAN
    assert best in bloom.WITHIN_TWO_PERCENT
    assert seconds == pytest.approx(104.7, rel=0.1)


def test_every_row_gets_an_answer_or_a_reason(judge: Judge) -> None:
    rows = [mutated(seed) for seed in range(400)]
    answers = [judge.answer_or_reason(row) for row in rows]
    assert all(answer["why"] for answer in answers)
    told = [answer for answer in answers if answer["step_time_s"] is not None]
    assert all(answer["step_time_s"] > 0 and answer["peak_memory_bytes"] > 0 for answer in told)
    assert len(told) > 100, "most fields are not needed"
    predicted = {id(row): answer["step_time_s"] for row, answer in zip(rows, answers, strict=True)}
    known = [row for row in errors.usable(rows) if predicted[id(row)] is not None]
    table = errors.errors_of(known, lambda row: predicted[id(row)])
    assert "constant" in errors.show(table)
    assert "told so" in errors.show_memory(errors.memory_errors(list(zip(rows, answers, strict=True))))


@pytest.mark.parametrize("row", [None, [], "row", {}, {"id": 7}, {"model": None, "hardware": None}])
def test_what_is_no_row_gets_a_reason(row: Any, judge: Judge) -> None:
    assert judge.answer_or_reason(row)["step_time_s"] is None


def changed(part: str, **changes: Any) -> dict[str, Any]:
    """Return a row with other fields in a part; those that are `...` are missing."""
    row = measured()
    fields = row[part] | changes
    return row | {part: {name: value for name, value in fields.items() if value is not ...}}


def seconds_of(judge: Judge, row: dict[str, Any]) -> float:
    answer = judge.answer_or_reason(row)
    assert answer["step_time_s"] is not None, answer["why"]
    return answer["step_time_s"]


def test_numbers_in_text_are_read(judge: Judge) -> None:
    plain = seconds_of(judge, measured())
    assert seconds_of(judge, changed("model", hidden="14,336", layers="70.0", heads="112")) == plain
    assert seconds_of(judge, changed("hardware", gpu_mem_GB="80 GB", intra_bw_GBps="300")) == plain
    answer = judge.answer_or_reason(changed("hardware", intra_bw_GBps="fast"))
    assert answer["step_time_s"] == plain, "the table's link is as fast"
    assert "hardware.intra_bw_GBps=fast" in answer["why"]


def test_degrees_and_batches_that_are_not_printed_follow_from_others(judge: Judge) -> None:
    plain = seconds_of(judge, measured())
    assert seconds_of(judge, changed("parallel", dp=...)) == plain
    assert seconds_of(judge, changed("hardware", gpus=...)) == plain
    assert seconds_of(judge, changed("batch", **{"global": ..., "tokens": 2048 * 2048})) == plain
    assert seconds_of(judge, changed("batch", **{"global": ...})) == plain
    assert seconds_of(judge, changed("batch", grad_accum=...)) == plain
    assert cleaned(changed("batch", micro=..., grad_accum=...))["batch"]["micro"] == 1, "usual where there are stages"


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (changed("model", layers=0.5), "model.layers=0.5"),
        (changed("model", hidden=-4), "model.hidden=-4"),
        (changed("parallel", tp="many"), "parallel.tp=many"),
        (changed("parallel", pp=73), "parallel.pp=73"),
        (changed("parallel", ep=8), "model.experts"),
        (changed("model", experts=4, experts_per_token=8), "experts_per_token=8"),
        (changed("batch", **{"global": ..., "micro": ...}), "batch.global"),
        (changed("hardware", gpu="Quantum", peak_bf16_dense_tflops=...), "Quantum"),
        (measured(task="inference"), "no training"),
    ],
)
def test_what_cannot_be_is_a_reason(row: dict[str, Any], word: str, judge: Judge) -> None:
    answer = judge.answer_or_reason(row)
    assert answer["step_time_s"] is None
    assert word in answer["why"]


def test_a_gpu_is_the_one_that_its_name_or_its_peak_says() -> None:
    names = {
        "A800-SXM4-80GB": "a100-sxm-80gb", "NVIDIA H800": "h100-sxm", "H20": "h100-sxm", "H200": "h200-sxm",
        "H100-SXM5-80GB": "h100-sxm", "H100-96GB-HBM2e-500W": "h100-hbm2e-500w", "GB200": "gb200", "B200-SXM": "b200",
        "A100-40GB": "a100-sxm-40gb", "Tesla V100-SXM2-16GB": "v100-sxm2-16gb", "V100-SXM3-32GB": "v100-sxm3-32gb",
        "MI355X": "mi355x", "MI300X": "mi300x", "L4": "l4", "L40S": "l40s", "RTX 4090": "rtx-4090", "TPU v5p": "a100-sxm-80gb",
    }  # fmt: skip
    assert {name: gpu_of(name, None).device for name in names} == names
    assert gpu_of("X9000", 900.0).device == "h100-sxm"
    assert gpu_of("A800", None).link_gb_per_s == 200


def test_recompute_of_some_layers_lies_between_none_and_all(judge: Judge) -> None:
    none, some, most, full = (
        judge.answer_or_reason(measured(recompute=kind)) for kind in ("none", 2, "4 layers", "full (uniform)")
    )
    assert none["step_time_s"] < some["step_time_s"] < most["step_time_s"] < full["step_time_s"]
    assert none["peak_memory_bytes"] > some["peak_memory_bytes"] > full["peak_memory_bytes"]


def test_a_row_that_says_nothing_of_recompute_fits_where_its_least_does(judge: Judge) -> None:
    big = changed("parallel", tp=4, pp=12, dp=8) | {"batch": {"global": 2048, "micro": 2}}
    silent, none, full = (judge.answer_or_reason(big | {"recompute": kind}) for kind in (None, "none", "full"))
    assert (none["fits"], silent["fits"], full["fits"]) == (False, True, True)
    assert silent["step_time_s"] == none["step_time_s"]
    assert none["peak_memory_bytes"] > silent["peak_memory_bytes"] >= full["peak_memory_bytes"]
    assert "of which the row says nothing" in silent["why"]


def test_a_command_answers_every_line_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        measured(id="one"),
        measured(id="one"),
        None,
        7,
        measured(id=float("nan")),
        measured(id=None, group="\ud800"),
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\nnot a row\n" + "[" * 100_000 + "\n\n"
    files = {
        "lines.jsonl": text,
        "list.json": json.dumps(rows),
        "object.json": json.dumps({"rows": rows}),
        "none.json": "[]",
    }
    for name, content in files.items():
        (tmp_path / name).write_text("\ufeff" + content if name == "list.json" else content, encoding="utf-8")
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["evaluate", *(str(tmp_path / name) for name in files), "--json", str(out)])
    main()
    found = json.loads(out.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert len(found["rows"]) == 3 * len(rows) + 2
    assert sum(answer["step_time_s"] is not None for answer in found["rows"]) == 3 * 4


def test_a_compiled_loss_keeps_less_and_lists_of_gathered_tensors_take_time(judge: Judge) -> None:
    torchtitan = {"group": "torchtitan", "flash_attention": True, "measured": {}, "mem_kind": None}
    whole = changed("parallel", torch_compile=True, tp=8, pp=1, dp=48) | torchtitan
    old, new = (whole | {"source": name} for name in ("a_202412", "b_202506"))
    assert judge.answer(new)["peak_memory_bytes"] < judge.answer(old)["peak_memory_bytes"]
    listed = changed("parallel", tp=1, pp=1, dp=384, zero_stage=3)
    setup = setup_of(cleaned(listed))
    assert setup.copies_per_rank == 1
    cluster, model = cluster_of(cleaned(listed)), model_of(cleaned(listed))
    costs = StepCosts(model, cluster)
    assert costs.seconds(dataclasses.replace(setup, copies_per_rank=0.0)) < costs.seconds(setup)
    assert setup_of(cleaned(changed("parallel", fsdp_size=4, zero_stage=3))).shard == 4


def test_what_products_in_fp8_read_is_gathered_in_fp8_and_grouped_keys_go_round_once() -> None:
    llama = changed("model", arch="llama", gated_mlp=True, kv_heads=8) | {
        "group": "nemo", "source": "its documents", "flash_attention": True, "precision": "fp8", "recompute": "none",
        "parallel": {"dp": 1, "tp": 8, "pp": 6, "cp": 8, "sp": True, "zero_stage": 1},
    }  # fmt: skip
    row = cleaned(llama)
    setup, costs = setup_of(row), StepCosts(model_of(row), cluster_of(row))
    assert (setup.gathers_low, setup.kv_share) == (True, 8 / 112)
    grouped = costs.seconds(setup)
    assert costs.seconds(dataclasses.replace(setup, gathers_low=False)) > grouped
    assert costs.seconds(dataclasses.replace(setup, dtype="bf16", gathers_low=False)) == costs.seconds(
        dataclasses.replace(setup, dtype="bf16")
    )
    slow = dataclasses.replace(cluster_of(row), network=LinkSpec(name="slow", bytes_per_s=1e9))
    costs = StepCosts(model_of(row), slow)
    assert costs.seconds(dataclasses.replace(setup, kv_share=1.0)) > 1.5 * costs.seconds(setup)


def test_products_that_are_cut_to_overlap_cost_the_host() -> None:
    nanotron = {"group": "nanotron-ultrascale", "source": "its repository", "flash_attention": True}
    row = cleaned(changed("parallel", tp=8, pp=1, dp=48) | nanotron)
    setup, costs = setup_of(row), StepCosts(model_of(row), cluster_of(row))
    small = dataclasses.replace(setup, micro_batch_size=0.01)
    assert setup.tp_operators > 0
    assert costs.seconds(dataclasses.replace(small, tp_operators=0.0)) < 0.95 * costs.seconds(small)


def test_what_names_the_source_says_more_of_its_software_than_what_it_is_compared_with() -> None:
    notes = "ZeRO-3 = DeepSpeed without model parallelism"
    old = changed("parallel", zero_stage=0) | {
        "group": "sc21",
        "source": "github:NVIDIA/Megatron-LM images",
        "notes": notes,
    }
    assert software_of(cleaned(old), recent=False).sends_slices
    assert software_of(cleaned(old), recent=False).copies_per_rank == 0
    sharded = changed("parallel", zero_stage=3) | {name: old[name] for name in ("group", "source", "notes")}
    assert software_of(cleaned(sharded), recent=False).copies_per_rank == 1, "no other tool had ZeRO-3 for it"


def test_a_host_that_waits_for_each_kernel_adds_its_time() -> None:
    row = cleaned(measured())
    setup, costs = setup_of(row), StepCosts(model_of(row), cluster_of(row))
    assert setup.waits_for_device, "on 384 GPUs with CUDA_LAUNCH_BLOCKING=1"
    assert not setup_of(
        cleaned(changed("hardware", gpus=160) | {"batch": {"global": 2040, "micro": 1}})
    ).waits_for_device
    waits, ahead = costs.seconds(setup), costs.seconds(dataclasses.replace(setup, waits_for_device=False))
    assert 1.01 < waits / ahead < 1.3
    one = dataclasses.replace(setup, micro_batch_size=1.0, micro_batches=2 * setup.micro_batches)
    assert costs.seconds(one) / costs.seconds(dataclasses.replace(one, waits_for_device=False)) > waits / ahead


def test_what_follows_the_last_block_does_not_run_again() -> None:
    row = cleaned(measured())
    setup, costs = setup_of(row), StepCosts(model_of(row), cluster_of(row))
    all_again, nothing = (dataclasses.replace(setup, **one) for one in ({"keeps_head": False}, {"recompute": "none"}))
    head = costs.cost(all_again).recompute_s - costs.cost(setup).recompute_s
    assert setup.keeps_head
    assert head > 0
    assert costs.cost(nothing).recompute_s == 0


def test_a_loss_moves_what_its_tool_moves() -> None:
    row = cleaned(measured())
    setup, costs = setup_of(row), StepCosts(model_of(row), cluster_of(row))
    assert sum(setup.loss_traffic) == 52
    assert costs.seconds(dataclasses.replace(setup, loss_traffic=(2.0, 4.0))) < costs.seconds(setup)


def test_omni_path_carries_half_of_what_infiniband_does() -> None:
    row = measured()
    network = cluster_of(cleaned(row)).network
    assert network is not None
    assert network.bytes_per_s == pytest.approx(0.5 * 6.25e9)
    row["hardware"] = row["hardware"] | {"notes": "HDR"}
    network = cluster_of(cleaned(row)).network
    assert network is not None
    assert network.bytes_per_s == pytest.approx(6.25e9)


def test_unknown_devices_and_groups_are_costed(judge: Judge) -> None:
    row = measured(group="nobody", source="a paper of 2030")
    row["hardware"] = row["hardware"] | {"gpu": "H300-SXM9"}
    assert judge.answer_or_reason(row)["step_time_s"] > 0
    row["hardware"] = row["hardware"] | {"gpu": "Quantum"}
    assert judge.answer_or_reason(row)["step_time_s"] > 0


def test_a_table_prints_both_baselines_and_a_mean_over_groups() -> None:
    rows = [measured(id="one"), measured(id="two", group="nobody")]
    text = errors.show(errors.errors_of(rows, lambda row: 100.0))
    assert all(word in text for word in ("constant", "Calculon", "28.9"))
    assert text.splitlines()[-1].startswith("over groups: median 4.5 %")


def test_memory_is_told_as_it_was_read() -> None:
    assert as_read(10e9, "torch_max_allocated(max over stages)") == 10e9
    assert as_read(10e9, None) == 10e9
    assert as_read(10e9, "nvidia-smi") > as_read(10e9, "torch_max_reserved_max_over_ranks") > 10e9


def test_a_rows_software_is_that_of_its_source() -> None:
    assert setup_of(cleaned(measured())).blocks_on_messages, "Megatron-DeepSpeed"
    notes = "recipes for some of these use FSDP"
    assert software_of(measured(group="megatron-bridge", source="", notes=notes), recent=True).fused
    assert not software_of(measured(group="misc", source="", notes=notes), recent=True).fused
