"""A seed becomes a program: a model, a loss, a training script and a plan, all plain values that travel as JSON."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.fuzz import parts
from benchmarks.fuzz.optim import OPTIMIZERS, RARE
from benchmarks.fuzz.program import complete

PLAN_KINDS = (
    "single", "data_parallel", "model_parallel", "dp", "zero1", "zero2", "zero3", "tp", "pp",
    "dp_tp", "dp_pp", "tp_pp", "dp_tp_zero", "dp_pp_zero",
)  # fmt: skip

_ROOT: dict[str, Any] = dict.fromkeys(
    (
        "lambdas", "scales", "side", "detach", "unused", "logit_scale", "softcap", "pad_logits", "inplace_between",
        "mode_branch", "complex", "dtype_probe", "item_hook", "patched", "calls", "rounds", "own_shift", "input_gradient",
        "ema", "square", "inplace_entry", "dict_blocks", "cls", "select", "trim",
    ),
    True,
) | {"value_branch": 0.7, "tau": 1.5}  # fmt: skip
"""What a model's own forward may do besides calling its blocks."""
_FOR_SEQUENCES = ("cls", "select", "trim")
_NOT_FOR_MAPS = ("side", "complex", "rounds", "ema", "square", "inplace_entry", "dict_blocks", *_FOR_SEQUENCES)

_HEADS = {6: (2, 3), 7: (1, 7), 8: (2, 4), 9: (3,), 10: (2, 5), 12: (2, 3, 4, 6), 16: (4,)}


class Draw:
    """Draws one program.

    Args:
        seed: Names the program.
        kinds: Kinds of plan to choose from.
    """

    def __init__(self, seed: int, kinds: tuple[str, ...] = PLAN_KINDS) -> None:
        self.random = random.Random(seed)
        self.seed, self.kinds = seed, kinds

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def program(self) -> dict[str, Any]:
        plan, kind = self.plan()
        model = self.model()
        program: dict[str, Any] = {"seed": self.seed, "kind": kind, "plan": plan, "data_seed": self.seed % 100003}
        program["model"] = model
        program["loss"] = self.loss(model)
        program["mask"] = model["domain"] in ("tokens", "series") and self.chance(0.25)
        program["batch_form"] = self.pick("dict", "dict", "pair", "pair_dict", "pair_tuple")
        program["optimizer"] = self.optimizer()
        program["clip"] = self.pick(None, None, None, 0.5, 3.0)
        program["built_first"] = self.chance(0.3)
        program["script"] = self.script(model)
        if program["mask"] and all(m["kind"] in ("mlp", "attention") for m in model["blocks"]) and self.chance(0.3):
            program["ragged"] = True
        if self.chance(0.03) and model["blocks"][0]["kind"] == "mlp":
            model["blocks"][0]["dropout"] = 0.2
        if self.chance(0.05) and any(m["kind"] in ("mlp", "attention") for m in model["blocks"]):
            model["frozen"] = [self.pick("norms", "stem", "biases", "blocks.0")]
        return complete(program)

    # -- plans ------------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[str, str]:
        kind = self.random.choice(self.kinds)
        words = self.plan_words(kind)
        if "micro_batches" not in words:
            words += self.pick("", "", "", ",micro_batches=2", ",micro_batches=3")
        if self.chance(0.15):
            words += self.pick(",recompute=full", ",recompute=selective")
        return words, kind

    def plan_words(self, kind: str) -> str:
        if kind in ("single", "data_parallel", "model_parallel"):
            return kind
        if kind == "dp":
            return f"dp={self.pick(2, 2, 2, 3, 4)}"
        if kind in ("zero1", "zero2", "zero3"):
            extra = self.pick("", "", "", "", ",offload=optimizer", ",overlap=off")
            if kind == "zero3" and self.chance(0.8):  # parameters as small as these stay whole otherwise
                extra += ",whole_below=0"
            return f"dp={self.pick(2, 2, 2, 3, 4)},zero={kind[-1]}{extra}"
        if kind == "tp":
            return f"tp={self.pick(2, 2, 2, 2, 4)}{self.pick('', '', ',sequence_parallel=off')}"
        if kind == "pp":
            return f"pp=2{self.schedule()}"
        if kind in ("dp_tp", "dp_tp_zero"):
            return f"dp=2,tp=2{self.sharding(kind)}"
        if kind in ("dp_pp", "dp_pp_zero"):
            return f"dp=2,pp=2{self.sharding(kind)}{self.schedule()}"
        return f"tp=2,pp=2{self.schedule()}"

    def sharding(self, kind: str) -> str:
        return self.pick(",zero=1", ",zero=2", ",zero=3,whole_below=0") if kind.endswith("zero") else ""

    def schedule(self) -> str:
        name = self.pick("none", "gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zbv")
        if name == "none":
            return ""
        if name == "interleaved":
            return f",schedule=interleaved,virtual=2,micro_batches={self.pick(2, 4)}"
        return f",schedule={name},micro_batches={self.pick(2, 2, 4) if name != 'gpipe' else self.pick(1, 2, 3)}"

    # -- models -----------------------------------------------------------------------------------------------------

    def model(self) -> dict[str, Any]:
        domain = self.pick("tokens", "tokens", "tokens", "series", "vectors", "images")
        width = self.pick(*_HEADS)
        count = self.pick(1, 2, 2, 3, 4)
        model: dict[str, Any] = {"domain": domain, "width": width, "outputs": self.pick(5, 7, 11), "root": {}}
        if domain == "tokens":
            model["vocabulary"] = self.pick(11, 13, 16, 29)
            model["stem"] = {"positions": self.chance(0.7)}
            if self.chance(0.1):
                model["stem"]["padding_idx"] = 0
            if self.chance(0.03):
                model["stem"]["max_norm"] = 1.0
            if self.chance(0.03):
                model["stem"]["scale_grad_by_freq"] = True
        elif domain in ("series", "vectors"):
            model["inputs"] = self.pick(3, 5, 8)
        else:
            model["stem"] = {"stride": self.pick(1, 2)}
        if domain in ("tokens", "series"):
            model["pool"] = self.pick("none", "none", "none", "mean", "first", "last")
        make = self.image_block if domain == "images" else self.block
        if self.chance(0.6):  # blocks alike, as most models have them
            form = make(domain, width)
            model["blocks"] = [dict(form) for _ in range(count)]
            if count > 1 and self.chance(0.25):
                self.vary(model["blocks"][-1])
        else:
            model["blocks"] = [make(domain, width) for _ in range(count)]
        model["calls"] = self.calls(model["blocks"])
        model["head_norm"] = self.pick("layer", "rms", "none")
        model["head_bias"] = self.chance(0.5)
        self.root(model)
        if domain == "tokens" and model["pool"] == "none" and self.chance(0.25):
            model["outputs"] = model["vocabulary"]
            model["tie"] = self.pick("assign", "assign", "assign", "assign", "data")
        return model

    def calls(self, blocks: list[dict[str, Any]]) -> list[list[Any]]:
        calls: list[list[Any]] = [[index, False] for index in range(len(blocks))]
        if self.chance(0.12):
            index = self.random.randrange(len(blocks))
            flag = self.chance(0.5) and blocks[index]["kind"] == "mlp" and not blocks[index].get("when_last")
            if flag:
                blocks[index]["when_last"] = self.pick("normalize", "softmax")
            calls.append([index, flag])
        return calls

    def vary(self, form: dict[str, Any]) -> None:
        """Change in a block of a "same" shape what its shape does not show."""
        if form["kind"] in ("mlp", "functional", "stateful", "mixing", "conv"):
            how = self.pick("act", "temperature", "layer_idx")
            if how == "act":
                form["act"] = self.pick(*parts.FUNCTIONS)
            elif form["kind"] == "mlp":
                form[how] = 0.5 if how == "temperature" else 1
        elif form["kind"] == "attention":
            form[self.pick("causal", "sdpa")] = False

    def block(self, domain: str, width: int) -> dict[str, Any]:
        per_token = ["mlp"] * 6 + [
            "functional",
            "sequential",
            "experts",
            "experts",
            "checkpointed",
            "stateful",
            "mixing",
        ]
        along = ["attention"] * 6 + ["mha", "encoder", "einsum", "recurrent", "conv", "conv"]
        kind = self.pick(*(per_token if domain == "vectors" else per_token + along))
        form: dict[str, Any] = {
            "kind": kind,
            "norm": self.pick("layer", "layer", "rms", "nn.RMSNorm", "group", "plain", "none"),
        }
        if self.chance(0.03):
            form["norm"] = "batch"
        for name, share in (("post", 0.2), ("gain", 0.1), ("inplace_residual", 0.1)):
            if self.chance(share):
                form[name] = True
        return form | self.details(kind, width)

    def details(self, kind: str, width: int) -> dict[str, Any]:
        if kind in ("attention", "mha", "encoder", "einsum"):
            return self.attention(kind, width)
        if kind == "recurrent":
            return {
                "cell": self.pick("rnn", "gru", "lstm"),
                "bidirectional": self.chance(0.3),
                "batch_first": self.chance(0.7),
            }
        if kind == "conv":
            return {
                "conv": self.pick("plain", "depthwise", "transposed"),
                "causal": self.chance(0.5),
                "act": self.act(),
            }
        if kind == "experts":
            aux = self.pick("none", "none", "none", "attribute", "output")
            return {"count": self.pick(2, 3, 5), "hidden": self.pick(4, 5), "top_k": self.pick(0, 0, 1, 2), "aux": aux}
        form = self.feed_forward(kind)
        if kind == "stateful":
            form["state"] = self.pick("ema", "ema_assigned", "counter", "calls", "aux")
        if kind == "mixing":
            form |= {"over": self.pick("samples", "length", "length"), "length": self.pick(3, 5)}
        return form

    def act(self) -> str:
        return self.random.choice(parts.ACTIVATIONS)

    def feed_forward(self, kind: str) -> dict[str, Any]:
        form: dict[str, Any] = {"hidden": self.pick(5, 8, 12, 13, 16), "act": self.act()}
        if kind == "mlp":
            form["gate"] = self.pick("none", "none", "none", "chunk", "separate")
            form["bias"] = self.chance(0.7)
            if self.chance(0.1):
                form["linear"] = self.pick(*parts.LINEARS)
            for name, share, value in (
                ("inner_norm", 0.06, True), ("in_eval", 0.04, True), ("value_over", 0.04, self.pick(0.5, 1.0, 3.0)),
                ("temperature", 0.02, 0.5), ("layer_idx", 0.02, 1),
            ):  # fmt: skip
                if self.chance(share):
                    form[name] = value
        if kind == "sequential":
            form["act_last"] = self.chance(0.5)
        return form

    def attention(self, kind: str, width: int) -> dict[str, Any]:
        heads = self.random.choice(_HEADS[width])
        form: dict[str, Any] = {"heads": heads, "bias": self.chance(0.6)}
        if kind == "encoder":
            return form | {
                "hidden": self.pick(8, 13, width * width), "norm_first": self.chance(0.5),
                "encoder_activation": self.pick("relu", "gelu"),
            }  # fmt: skip
        if kind == "mha":
            return form | {"need_weights": self.chance(0.3)}
        if kind == "attention":
            form |= {"fused": self.pick("none", "split", "chunk", "unbind"), "sdpa": self.chance(0.6)}
            form |= {"causal": self.chance(0.6), "rotary": self.chance(0.3), "qk_norm": self.chance(0.15)}
            if form["fused"] in ("none", "split") and heads % 2 == 0 and self.chance(0.4):
                form["kv_heads"] = heads // 2
            if self.chance(0.08):
                form["scale"] = 0.5
            if self.chance(0.06):
                form["sink"] = True
            if self.chance(0.08):
                form["linear"] = self.pick(*parts.LINEARS)
        return form

    def image_block(self, _: str, __: int) -> dict[str, Any]:
        kind = self.pick("residual", "residual", "inverted", "conv_plain", "updown")
        form: dict[str, Any] = {
            "kind": kind,
            "norm": self.pick("group", "group", "layer", "none"),
            "hidden": self.pick(5, 6, 9),
        }
        if self.chance(0.1):
            form["norm"] = "batch"
        form["act"] = self.act() if kind != "residual" else self.pick("ReLU(inplace)", "ReLU", "GELU", "F.relu")
        if self.chance(0.2):
            form["inplace_residual"] = True
        if kind == "conv_plain":
            form["groups"] = self.pick(1, 2, 3)
        return form

    def root(self, model: dict[str, Any]) -> None:
        root, is_map = model["root"], model["domain"] == "images"
        is_sequence, options = model["domain"] in ("tokens", "series"), dict(_ROOT)
        if is_map:
            options = {name: value for name, value in options.items() if name not in _NOT_FOR_MAPS}
        if not is_sequence:
            options = {name: value for name, value in options.items() if name not in _FOR_SEQUENCES}
        choices = {"ema": ("early", "late"), "square": (3, 4), "complex": (True, True, "conjugated")}
        options |= {name: self.random.choice(values) for name, values in choices.items() if name in options}
        common = ("lambdas", "scales", "side", "detach", "unused", "logit_scale", "softcap", "pad_logits", "cls", "tau")
        for name, value in options.items():
            if self.chance(0.06 if name in common else 0.02):
                root[name] = value
        if any(
            form.get("aux") == "attribute" or form.get("state") == "aux" for form in model["blocks"]
        ) and self.chance(0.6):
            root["aux_sum"] = True
        model["output"] = self.pick("tensor", "tensor", "tuple", "dict", "dataclass")

    # -- losses, optimizers, scripts --------------------------------------------------------------------------------

    def loss(self, model: dict[str, Any]) -> dict[str, Any]:
        per_token = model["domain"] in ("tokens", "series") and model.get("pool", "none") == "none"
        kinds = ["ce", "ce", "mse", "by_hand", "focal", "top", "weighted", "masked", "masked"]
        kinds += ["shifted", "transposed", "own"] if per_token else []
        form: dict[str, Any] = {"kind": self.pick(*kinds)}
        if self.chance(0.03):
            form["kind"] = "batch_max"
        if form["kind"] == "own":
            model["output"] = "own_loss"
            return form | {"ignored": self.chance(0.5)}
        for name, share, value in (
            ("inplace", 0.06, self.pick("div_", "masked_fill_", "setitem", "clamp_", "view")), ("temperature", 0.1, 0.7),
            ("penalty", 0.05, self.pick("squares", "norms", "absolute", "orthogonal")), ("z", 0.06, True), ("reads", 0.05, True),
        ):  # fmt: skip
            if self.chance(share):
                form[name] = value
        if form["kind"] == "masked":
            form["weight"] = self.pick("tensor", "number") if self.chance(0.97) else "graph"
        leaves = any(f.get("aux", "none") != "none" or f.get("state") == "aux" for f in model["blocks"])
        if leaves:
            form["aux"] = "output" if model["output"] in ("dict", "tuple") else self.pick("root", "blocks")
        if form["kind"] == "ce" and self.chance(0.1):
            form["smoothing"] = 0.1
        return form

    def optimizer(self) -> dict[str, Any]:
        form = {"kind": self.random.choice(OPTIMIZERS), "lr": self.pick(0.1, 0.3), "decay": self.pick(0.0, 0.0, 0.05)}
        form["groups"] = "two" if self.chance(0.15) else "one"
        if self.chance(0.03):
            form["kind"] = self.random.choice(RARE)
        return form

    def script(self, model: dict[str, Any]) -> list[dict[str, Any]]:
        lengths, actions = self.pick((6,), (4, 6), (2, 6, 7), (1, 5)), []
        if model["domain"] == "images":
            lengths = self.pick((6,), (4, 6))
        sizes = self.pick((4,), (5,), (6,), (8,), (2, 5), (1, 6), (7, 3))
        count = self.pick(2, 2, 3, 3, 4)
        changing = self.chance(0.5)
        batch = 0
        for index in range(count):
            if self.chance(0.3):
                actions += self.between(model)
            if self.chance(0.3 if index == 0 else 0.15):
                batch += 1
                actions.append({"do": "eval", **self.sizes(sizes, lengths, changing), "batch": batch})
            batch += 1
            step = {"do": "step", **self.sizes(sizes, lengths, changing), "batch": batch}
            if index and self.chance(0.04) and model["domain"] != "images":
                step["flags"] = self.pick({"hidden": True}, {"depth": 1})
            actions.append(step)
        if "rounds" in model["root"]:
            actions[-1]["rounds"] = 3
        if self.chance(0.2):
            actions.append({"do": "state"})
        return actions

    def sizes(self, sizes: tuple[int, ...], lengths: tuple[int, ...], changing: bool) -> dict[str, int]:
        if not changing:
            return {"n": sizes[0], "t": lengths[-1]}
        return {"n": self.random.choice(sizes), "t": self.random.choice(lengths)}

    def between(self, model: dict[str, Any]) -> list[dict[str, Any]]:
        part = self.pick("norms", "biases", "stem", "blocks.0", "blocks.0", "all_but_head", "head", "all_but_norms")
        common: list[Any] = [
            [{"do": "freeze", "what": part}], [{"do": "unfreeze", "what": "all"}], [{"do": "lr", "factor": 0.5}],
            [{"do": "state", "keep": True}], [{"do": "forward", "n": 4, "t": 4, "batch": 77}], [{"do": "scheduler"}],
            [{"do": "mode", "training": False}], [{"do": "mode", "training": True}],
            [{"do": "mode", "of": "stem", "training": False}],
            [{"do": "set", "name": "tau", "value": 0.5}], [{"do": "zero_grad"}],
        ]  # fmt: skip
        rare: list[Any] = [
            [{"do": "clamp", "bound": 0.2}], [{"do": "grow", "factor": 8.0}], [{"do": "rebind"}], [{"do": "vector"}],
            [{"do": "copy"}], [{"do": "copy", "inside": True}], [{"do": "average"}], [{"do": "average", "inside": True}],
            [{"do": "load"}], [{"do": "replace"}], [{"do": "own_step", "n": 4, "t": 4, "batch": 88}],
            [{"do": "optimizer_state"}], [{"do": "hook"}], [{"do": "hook", "everywhere": True}],
        ]  # fmt: skip
        if len(model["blocks"]) > 1 and all(form == model["blocks"][0] for form in model["blocks"]):
            rare.append([{"do": "reorder"}])
        return self.random.choice(rare if self.chance(0.12) else common)


def draw(seed: int, kinds: tuple[str, ...] = PLAN_KINDS) -> dict[str, Any]:
    """Return the program of a seed."""
    return Draw(seed, kinds).program()
