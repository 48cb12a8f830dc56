"""What follows from a program's choices: its ranks, whether it runs in pieces, its features; and what cannot go together."""

from __future__ import annotations

from typing import Any

ALONG = ("attention", "mha", "encoder", "einsum", "recurrent", "conv", "mixing", "experts")
"""Blocks that look along the sequence, or return two things: not for rows that a mask has chosen."""
_STATES = ("ema", "ema_assigned", "counter")


def words_of(plan: str) -> dict[str, str]:
    """Return the plan's words.

    >>> words_of("dp=2,zero=1")
    {'dp': '2', 'zero': '1'}
    """
    pairs = [word.partition("=") for word in plan.split(",")]
    return {name: value for name, _, value in pairs}


def mixes_samples(program: dict[str, Any]) -> bool:
    """Return whether what is computed together changes the result: statistics, balance losses, moving averages."""
    model, loss = program["model"], program["loss"]
    for form in model["blocks"]:
        if form.get("norm") == "batch" or form.get("aux", "none") != "none" or form.get("linear") == "spectral_norm":
            return True
        if form.get("state") in (*_STATES, "aux") or (form["kind"] == "mixing" and form.get("over") == "samples"):
            return True
        if form.get("value_over") is not None or form.get("state") == "calls":
            return True
        # A sample runs into the in-place activation as often as another sample of its part asks for.
        starts_in_place = form["kind"] == "sequential" and not form.get("act_last")
        if "rounds" in model.get("root", {}) and starts_in_place and (form.get("norm") == "none" or form.get("post")):
            return True
    root = model.get("root", {})
    return loss["kind"] == "batch_max" or bool({"ema", "value_branch", "calls"} & set(root))


def complete(program: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from the choices, and take back what cannot go together."""
    words = words_of(program["plan"])
    mode = next((name for name in ("data_parallel", "model_parallel") if name in words), "ranks")
    dp, tp, pp = (int(words.get(name, 1)) for name in ("dp", "tp", "pp"))
    program["mode"] = mode
    program["ranks"] = dp * tp * pp if mode == "ranks" else 1
    program["degree"] = {"ranks": dp, "data_parallel": 2, "model_parallel": 1}[mode]
    program["micro_batches"] = int(words.get("micro_batches", 1))
    _fit_model(program)
    _fit_loss(program)
    _fit_script(program)
    program["pieces"] = mixes_samples(program) and program["degree"] * program["micro_batches"] > 1
    return program


def _fit_model(program: dict[str, Any]) -> None:
    model = program["model"]
    root, stem = model.setdefault("root", {}), model.get("stem", {})
    if program["degree"] > 1:  # a counter of one process says nothing about the others'
        for form in model["blocks"]:
            if form.get("state") == "calls":
                form["state"] = "counter"
    if any(form["kind"] == "updown" for form in model["blocks"]):
        stem["stride"] = 1
    if program["micro_batches"] > 1:
        stem.pop("scale_grad_by_freq", None)
    _fit_ragged(program)
    for name in _not_possible(program):
        root.pop(name, None)
    program["random"] = any(form.get("dropout") for form in model["blocks"])
    if model.get("tie", "none") != "none":
        model["outputs"] = model["vocabulary"]
    model["calls"] = [call for call in model["calls"] if call[0] < len(model["blocks"])]


def _fit_ragged(program: dict[str, Any]) -> None:
    """Let each rank pad its own share only where samples alone see what is padded."""
    model = program["model"]
    is_alone = model.get("pool", "none") == "none" and all(f["kind"] in ("mlp", "attention") for f in model["blocks"])
    # Statistics, a mean that a branch asks, and how often an id is in the batch have padding in them.
    is_alone = is_alone and not mixes_samples(program) and not model.get("stem", {}).get("scale_grad_by_freq")
    if program.get("ragged") and not (is_alone and model["domain"] in ("tokens", "series")):
        program["ragged"] = False
    if program.get("ragged"):
        program["mask"], program["batch_form"] = True, "dict"
        program["loss"] = {"kind": "masked", "weight": "tensor"}


def _not_possible(program: dict[str, Any]) -> set[str]:
    """Return what the root cannot do in this program."""
    model, found = program["model"], set()
    if program["degree"] > 1:
        found.add("calls")
    if any(form.get("aux") == "output" for form in model["blocks"]) or model["domain"] == "images":
        found.add("dict_blocks")
    if program["loss"]["kind"] != "own":
        found.add("own_shift")
    if model["domain"] not in ("series", "vectors"):
        found.add("input_gradient")
    if any(form["kind"] in ALONG for form in model["blocks"]):
        found.add("select")
    if program["degree"] * program["micro_batches"] > 1:
        found.add("trim")  # each part has a longest sample of its own
    return found | ({"cls"} if program.get("mask") else {"select", "trim"})


def _fit_loss(program: dict[str, Any]) -> None:
    model, form = program["model"], program["loss"]
    if form["kind"] in ("own", "weighted") or "rounds" in model["root"]:
        program["batch_form"] = "dict"
    if form["kind"] == "own":
        model["output"] = "own_loss"
    elif model.get("output") == "own_loss":
        model["output"] = "tensor"
    aux = form.get("aux")
    if aux == "output" and model.get("output") not in ("dict", "tuple"):
        form["aux"] = aux = "root"
    leaves = [f for f in model["blocks"] if f.get("aux", "none") != "none" or f.get("state") == "aux"]
    if not leaves:
        form.pop("aux", None)
    if aux in ("blocks", "root") or "penalty" in form:
        program["built_first"] = True
    if aux in ("root", "output") and any(f.get("aux") == "attribute" or f.get("state") == "aux" for f in leaves):
        model["root"]["aux_sum"] = True


def _fit_script(program: dict[str, Any]) -> None:
    unlike = program["mode"] == "data_parallel" and mixes_samples(program)
    program["script"] = [a for a in program["script"] if not (unlike and a["do"] == "forward")]
    if any(action["do"] == "add_group" for action in program["script"]):
        program["optimizer"]["groups"] = "head_first"


def features(program: dict[str, Any]) -> list[str]:
    """Return the names of everything that is in the program, for shares by feature."""
    model, loss = program["model"], program["loss"]
    found = {f"domain:{model['domain']}", f"loss:{loss['kind']}", f"optimizer:{program['optimizer']['kind']}"}
    for form in model["blocks"]:
        found.add(f"block:{form['kind']}")
        found |= {
            f"{name}:{form[name]}"
            for name in ("act", "norm", "linear", "aux", "state", "over", "gate", "fused")
            if name in form
        }
        found |= {
            f"block:{name}"
            for name in ("in_eval", "value_over", "temperature", "layer_idx", "rotary", "sink", "qk_norm", "kv_heads")
            if form.get(name)
        }
    found |= {f"root:{name}" for name in model.get("root", {})} | {
        f"stem:{name}" for name, v in model.get("stem", {}).items() if v
    }
    found |= {f"loss:{name}" for name in ("inplace", "penalty", "aux", "z", "temperature") if name in loss}
    found |= {f"script:{action['do']}" for action in program["script"]}
    found |= {f"flag:{name}" for action in program["script"] for name in action.get("flags", {})}
    if len({form["kind"] for form in model["blocks"]}) < len(model["blocks"]):
        first = model["blocks"][0]
        found.add("blocks:alike" if all(form == first for form in model["blocks"]) else "blocks:almost alike")
    if len(model["calls"]) > len(model["blocks"]):
        found.add("blocks:shared")
    sizes = {(a.get("n"), a.get("t")) for a in program["script"] if a["do"] in ("step", "eval")}
    found.add("sizes:changing" if len(sizes) > 1 else "sizes:constant")
    if min((a["n"] for a in program["script"] if a["do"] == "step"), default=9) < program["degree"]:
        found.add("sizes:fewer samples than ranks")
    for name in ("mask", "clip", "pieces", "ragged", "random"):
        if program.get(name):
            found.add(f"with:{name}")
    found |= {f"tie:{model['tie']}"} if model.get("tie", "none") != "none" else set()
    words = words_of(program["plan"])
    found |= {f"plan:{n}={words[n]}" for n in ("recompute", "schedule", "offload", "sequence_parallel") if n in words}
    if program["script"] and next((a["do"] for a in program["script"] if a["do"] in ("step", "eval")), "") == "eval":
        found.add("script:evaluation first")
    return sorted(found)
