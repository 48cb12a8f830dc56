"""One small program for each class of defect that was found by experiment: the feature that shows it, and the plan that it broke.

python -m benchmarks.fuzz.classes                  runs all and prints a table
python -m benchmarks.fuzz.classes --only "A1"      those whose name begins so
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from benchmarks.fuzz import engine
from benchmarks.fuzz.program import complete

MLP: dict[str, Any] = {"kind": "mlp", "hidden": 12, "act": "F.gelu"}
ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4, "fused": "none", "causal": True}
ENCODER: dict[str, Any] = {"kind": "encoder", "heads": 2, "hidden": 12}
STATE: dict[str, Any] = {"kind": "stateful", "hidden": 12}


def step(n: int = 4, t: int = 6, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"do": "step", "n": n, "t": t, "batch": batch, **more}


def evaluation(n: int = 4, t: int = 6, batch: int = 9) -> dict[str, Any]:
    return {"do": "eval", "n": n, "t": t, "batch": batch}


THREE = [step(), step(batch=2), step(batch=3)]


def make(
    plan: str,
    blocks: list[dict[str, Any]] | None = None,
    *,
    root: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    script: list[dict[str, Any]] | None = None,
    optimizer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a program from what is special about it."""
    blocks = copy.deepcopy(blocks or [MLP, MLP])
    spec: dict[str, Any] = {
        "domain": "tokens",
        "width": 8,
        "vocabulary": 11,
        "outputs": 11,
        "stem": {"positions": True},
        "blocks": blocks,
        "calls": [[index, False] for index in range(len(blocks))],
        "root": root or {},
        **(model or {}),
    }
    if spec["domain"] in ("series", "vectors"):
        spec["inputs"] = 5
    program = {
        "seed": 0,
        "kind": "class",
        "plan": plan,
        "data_seed": 5,
        "model": spec,
        "loss": loss or {"kind": "ce"},
        "optimizer": optimizer or {"kind": "sgd", "lr": 0.3},
        "script": copy.deepcopy(script or THREE),
        **more,
    }
    return complete(program)


def shared(flag_on_second: bool) -> dict[str, Any]:
    return {"calls": [[0, False], [1, False], [0, flag_on_second]]}


def freeze_then_all(what: str) -> list[dict[str, Any]]:
    return [{"do": "freeze", "what": what}, step(), {"do": "unfreeze", "what": "all"}, step(batch=2), step(batch=3)]


def after_a_step(*actions: dict[str, Any]) -> list[dict[str, Any]]:
    return [step(), *actions, step(batch=2), step(batch=3)]


EVAL_FIRST = [evaluation(), *THREE, evaluation(batch=8)]
MODE_LATER = [*THREE, evaluation(), step(batch=4)]
LONGER_LATER = [step(n=1, t=3), step(n=1, t=7, batch=2), step(n=1, t=7, batch=3)]
GROWN_LATER = [step(), {"do": "grow", "factor": 300.0}, step(batch=2), step(batch=3)]
ODD = [step(n=3, t=7), step(n=3, t=7, batch=2), step(n=3, t=7, batch=3)]
MORE_LATER = [step(n=1), step(n=5, batch=2), step(n=4, batch=3)]


def with_flags(**flags: Any) -> list[dict[str, Any]]:
    return [step(), step(batch=2, flags=flags), step(batch=3)]


def _tensor() -> dict[str, dict[str, Any]]:
    softmax = {**MLP, "act": "softmax"}
    last = {**MLP, "when_last": "softmax"}
    both = [ATTENTION, MLP]
    by_length = {**MLP, "kind": "mixing", "over": "length", "length": 4}
    normed = [{**ATTENTION, "heads": 3, "qk_norm": True}, MLP] * 2
    wide: dict[str, Any] = {"width": 12, "vocabulary": 16}
    even: dict[str, Any] = {"vocabulary": 16, "outputs": 16}
    bare = {**MLP, "norm": "none"}
    return {
        "A1 another activation in a block of the same shape": make("tp=2", [MLP, softmax]),
        "A1 another temperature": make("tp=2", [{**MLP, "temperature": 0.0}, {**MLP, "temperature": 0.5}]),
        "A1 another layer_idx": make("tp=2", [{**MLP, "layer_idx": 0}, {**MLP, "layer_idx": 1}]),
        "A2 evaluation first, dropout": make(
            "tp=2,sequence_parallel=off", [{**MLP, "dropout": 0.3, "hidden": 13}] * 3, script=[evaluation(3, 7), *ODD]
        ),
        "A3 logits written in the model": make("tp=2", both, root={"pad_logits": True}, model=even),
        "A3 logits div_ in the loss": make("tp=2", both, loss={"kind": "ce", "inplace": "div_"}, model=even),
        "A3 logits masked_fill_ in the loss": make("tp=2", both, loss={"kind": "ce", "inplace": "masked_fill_"}, model=even),
        "A4 all but the head frozen, then trained": make("tp=2", normed, script=freeze_then_all("all_but_head"), model=wide),
        "A4 norms frozen, then trained": make("tp=2", normed, script=freeze_then_all("norms"), model=wide),
        "A4b norms frozen under dp, tp and ZeRO-2": make("dp=2,tp=2,zero=2", normed, script=freeze_then_all("norms"), model=wide),
        "A5 aux kept as an attribute": make(
            "tp=2", [{**STATE, "state": "aux"}] * 2, root={"aux_sum": True}, loss={"kind": "ce", "aux": "root"},
            model={"output": "tuple"},
        ),
        "A5 moving average in a block": make("tp=2", [{**STATE, "state": "ema"}] * 2),
        "A6 one sample first, a block that mixes samples": make("tp=2", [{**MLP, "kind": "mixing"}] * 2, script=MORE_LATER),
        "A7 a shared block called with another flag": make("tp=2", [last, MLP], model=shared(True)),
        "A7 a branch on the mode": make("tp=2", [{**MLP, "in_eval": True}] * 2, script=MODE_LATER),
        "A7 a branch on the length": make("tp=2", [by_length] * 2, script=LONGER_LATER),
        "A7 a branch on values": make("tp=2", [{**bare, "value_over": 50.0}] * 2, script=GROWN_LATER),
        "A7 max_norm of an embedding": make("tp=2", both, model={**even, "stem": {"positions": True, "max_norm": 0.5}}),
        "A7 scale_grad_by_freq": make("tp=2", both, model={**even, "stem": {"scale_grad_by_freq": True}}),
        "A16 penalty over parameters in the loss": make("tp=2", both, loss={"kind": "ce", "penalty": "squares"}),
        "B6 torch's encoder in eval mode": make("tp=2", [ENCODER] * 2, script=MODE_LATER),
        "B7 as many elements as units": make("tp=2", [{**ENCODER, "heads": 1, "hidden": 64}]),
        "B8 a mask only later": make(
            "tp=2", [{**MLP, "masks_first": True}] * 3, script=[step(), step(batch=2, mask=True), step(batch=3)]
        ),
        "B8 fewer layers later": make("tp=2", [MLP] * 3, script=with_flags(depth=2)),
        "B8 hidden states asked for later": make("tp=2", [MLP] * 3, script=with_flags(hidden=True)),
        "D1-IV orthogonality in the loss": make("tp=2", both, loss={"kind": "ce", "penalty": "orthogonal"}),
        "D2b-IV a number drawn on one rank": make(
            "tp=2,sequence_parallel=off", [{**MLP, "dropout": 0.3}] * 2, script=after_a_step({"do": "draw"})
        ),
        "D5-IV a square buffer": make("tp=2", [{**MLP, "hidden": 16, "square": True}] * 2),
        "D7-IV average under tp": make("tp=2", both, script=[{"do": "average"}, *THREE, {"do": "average"}]),
        "D14-IV a loss that reads block.aux": make(
            "tp=2", [{**STATE, "state": "aux"}] * 2, loss={"kind": "ce", "aux": "blocks"}
        ),
        "A14 ranks that share layers get different batches": make("tp=2", both, script=[step(), step(batch=2, misfed=True)]),
    }  # fmt: skip


def _pipeline() -> dict[str, dict[str, Any]]:
    both = [ATTENTION, MLP]
    plain = {"domain": "images", "outputs": 5}
    relu = [{"kind": "conv_plain", "norm": "group"}] * 4
    return {
        "A13 moving average of the root, read first by another stage": make("pp=2", both * 2, root={"ema": "late"}),
        "A13 moving average of the root, two stages a rank": make(
            "pp=2,schedule=interleaved,virtual=2,micro_batches=2", both * 2, root={"ema": "early"}
        ),
        "A13 calls counted in the root": make("pp=2", both * 2, root={"calls": True}),
        "A13 calls counted in a block": make("pp=2", [{**STATE, "state": "calls"}] * 3),
        "B1 rows chosen by a mask": make("pp=2", [MLP] * 3, root={"select": True}, mask=True),
        "B1 cut to the longest": make("pp=2", [MLP] * 3, root={"trim": True}, mask=True),
        "B2 aux left as an attribute": make(
            "pp=2", [{**STATE, "state": "aux"}] * 3, root={"aux_sum": True}, loss={"kind": "ce", "aux": "root"},
            model={"output": "tuple"},
        ),
        "B2 experts' balance, read by the loss": make(
            "pp=2,micro_batches=2", [{"kind": "experts", "aux": "attribute"}] * 3, loss={"kind": "ce", "aux": "blocks"}
        ),
        "B3 the first stage frozen, then trained": make("pp=2", [MLP] * 3, script=freeze_then_all("blocks.0")),
        "B3 parts of all stages frozen, then trained": make("pp=2", [MLP] * 3, script=freeze_then_all("all_but_head")),
        "B4 a layer patched on the instance": make("pp=2", [MLP] * 3, root={"patched": True}),
        "B5 a hook that reads a number": make("pp=2", [MLP] * 3, root={"item_hook": True}),
        "D4-IV ReLU in place at the start of a stage": make("pp=2", relu, model=plain),
        "D7-IV average under pp": make("pp=2", [MLP] * 3, script=[{"do": "average"}, *THREE, {"do": "average"}]),
        "D10-IV a layer asked for its dtype": make("pp=2", [MLP] * 3, root={"dtype_probe": True}),
        "D11-IV gradient penalty": make("pp=2", [MLP] * 3, root={"input_gradient": True}, model={"domain": "series"}),
        "D12-IV a conjugated parameter": make(
            "pp=2", [MLP] * 3, root={"complex": "conjugated"}, script=[*THREE, {"do": "state"}]
        ),
        "A9 one norm of all gradients, pp": make("pp=2", [MLP] * 3, optimizer={"kind": "global_norm"}),
        "A10 tied by .data, pp": make("pp=2", both * 2, model={"tie": "data"}),
    }  # fmt: skip


def _data() -> dict[str, dict[str, Any]]:
    both = [ATTENTION, MLP]
    batch_norm = [{**MLP, "norm": "batch"}] * 2
    spectral = [{**MLP, "linear": "spectral_norm"}] * 2
    added = after_a_step({"do": "add_group", "lr": 0.2})
    moved = [{"do": "average"}, *THREE, {"do": "average"}]
    return {
        "A8 BatchNorm under recompute": make("single,recompute=full", batch_norm, script=MODE_LATER),
        "A8 spectral norm under recompute": make("single,recompute=full", spectral, script=MODE_LATER),
        "A9 one norm of all gradients": make("dp=2,zero=1", both, optimizer={"kind": "global_norm"}),
        "A9 a ratio for each tensor": make("dp=2,zero=1", both, optimizer={"kind": "trust_ratio"}),
        "A9 a hybrid whose first group is plain": make("dp=2,zero=1", both, optimizer={"kind": "hybrid"}),
        "A10 add_param_group": make("dp=2,zero=1", both, optimizer={"kind": "sgd", "groups": "head_first"}, script=added),
        "A10 vector_to_parameters": make("dp=2,zero=1", both, script=after_a_step({"do": "vector"})),
        "A10 p.data = ...": make("dp=2,zero=1", both, script=after_a_step({"do": "rebind"})),
        "A10 tied by .data, ZeRO-1": make("dp=2,zero=1", both, model={"tie": "data"}),
        "A10 tied by .data, tp": make("tp=2", both, model={"vocabulary": 16, "tie": "data"}),
        "A10 clamped between steps, offload": make(
            "dp=2,zero=1,offload=optimizer", both, script=after_a_step({"do": "clamp", "bound": 0.2})
        ),
        "A11 a replaced submodule": make("dp=2", both, script=after_a_step({"do": "replace"})),
        "A11 layers in another order": make("pp=2", [MLP] * 3, script=after_a_step({"do": "reorder"})),
        "A12 an attribute set between steps": make(
            "data_parallel", both, script=after_a_step({"do": "set", "name": "tau", "value": 0.4})
        ),
        "A12 aux left on the module": make(
            "data_parallel", [{**STATE, "state": "aux"}] * 2, loss={"kind": "ce", "aux": "blocks"}
        ),
        "A15 a weight that has a graph": make("dp=2", both, loss={"kind": "masked", "weight": "graph"}),
        "A17 the model's own loss drops the first label": make(
            "single,micro_batches=2", both, root={"own_shift": True}, loss={"kind": "own", "ignored": True}
        ),
        "a loss that is no mean over samples": make("dp=2", both, loss={"kind": "batch_max"}),
        "B9 a layer called as often as the data say": make(
            "dp=2,zero=3,whole_below=0", [MLP] * 3, root={"rounds": True},
            script=[step(), step(batch=2, rounds=4), step(batch=3, rounds=3)],
        ),
        "B10 copy.deepcopy under ZeRO-3": make("dp=2,zero=3,whole_below=0", both, script=after_a_step({"do": "copy"})),
        "B10 average under ZeRO-3": make("dp=2,zero=3,whole_below=0", both, script=moved),
        "B11 caches as long as a rank's own batch": make("dp=2", [{**ATTENTION, "rotary": True}, MLP], ragged=True),
        "B12 a hook on one rank": make("dp=2", both, script=[{"do": "hook"}, *THREE]),
        "D2-IV a loop of one's own, dp": make("dp=2", both, script=after_a_step({"do": "own_step", "n": 4, "t": 6, "batch": 7})),
        "D2-IV a loop of one's own, ZeRO-1": make(
            "dp=2,zero=1", both, script=after_a_step({"do": "own_step", "n": 4, "t": 6, "batch": 7})
        ),
        "max_norm of an embedding, dp": make("dp=2", both, model={"stem": {"positions": True, "max_norm": 0.5}}),
        "scale_grad_by_freq, dp": make("dp=2", both, model={"stem": {"positions": True, "scale_grad_by_freq": True}}),
        "load_state_dict between steps, ZeRO-3": make(
            "dp=2,zero=3,whole_below=0", both, script=[{"do": "state", "keep": True}, *THREE, {"do": "load"}, step(batch=5)]
        ),
        "load_state_dict between steps, offload": make(
            "dp=2,zero=1,offload=optimizer", both, script=[{"do": "state", "keep": True}, *THREE, {"do": "load"}, step(batch=5)]
        ),
        "penalty over parameters, ZeRO-3": make("dp=2,zero=3,whole_below=0", both, loss={"kind": "ce", "penalty": "squares"}),
    }  # fmt: skip


def programs() -> dict[str, dict[str, Any]]:
    """Return the name of each class and its program."""
    return {**_tensor(), **_pipeline(), **_data()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows = {}
    for name, program in programs().items():
        if name.startswith(arguments.only):
            found, seconds = engine.run_program(program, arguments.timeout)
            rows[name] = {
                "plan": program["plan"],
                "verdict": found.kind,
                "detail": found.detail,
                "largest": found.largest,
            }
            print(f"{found.kind:8s} {name} [{program['plan']}] {seconds:.2f} s  {found.detail[:180]}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
