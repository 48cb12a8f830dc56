"""Cases of `fuzz_inputs` by number: the arguments, variables and files that each entry of the command is given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults import nasty

from meshwright.hardware import load_cluster
from meshwright.spec import ModelSpec, Plan

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE")
_OURS = (
    "MESHWRIGHT_JOIN_TIMEOUT_S",
    "MESHWRIGHT_TRANSPORT",
    "MESHWRIGHT_CLUSTER",
    "CUDA_VISIBLE_DEVICES",
    "TORCHELASTIC_RESTART_COUNT",
)

CONFIG: dict[str, Any] = {
    "model": {"target": "mine:build_model", "kwargs": {"width": 4}},
    "data": {"source": "python-stdlib", "sequence_length": 32, "num_workers": 0},
    "optimizer": {
        "name": "adamw",
        "lr": 0.001,
        "betas": [0.9, 0.99],
        "param_groups": [{"patterns": ["*.bias"], "lr_scale": 2.0}],
    },
    "schedule": {"kind": "cosine", "warmup_steps": 2},
    "train": {
        "steps": 4,
        "global_batch_size": 8,
        "plan": "dp=2",
        "seed": 1,
        "loss": "cross_entropy",
        "name": "fuzz",
        "directory": "runs",
    },
    "checkpoint": {"every_steps": 2, "keep": 1},
}
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "steps_per_print": 10,
}
HUGGING_FACE: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


class Case:
    """One input: arguments of the command, variables, and files that it names."""

    def __init__(self, entry: str, arguments: list[str], variables: dict[str, str] | None = None) -> None:
        self.entry = entry
        self.arguments = arguments
        self.variables = variables or {}


class Inputs:
    """Cases by number, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text("def build_model(width=4): ...\n")
        self.config = folder / "ok.toml"
        self.config.write_text(nasty.as_toml(CONFIG))
        self.odd = nasty.odd_files(folder / "odd")
        self.plan = json.loads(Plan.parse("dp=2,tp=2,zero=1").to_json())
        self.cluster = json.loads(load_cluster("2x8xh100-sxm").to_json())
        sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 64}
        self.model = json.loads(ModelSpec.transformer(name="tiny", **sizes).to_json())
        self.makers: list[Callable[[random.Random], Case]] = [
            *(
                self.toml,
                self.toml,
                self.overrides,
                self.overrides,
                self.plan_line,
                self.plan_json,
                self.deepspeed,
                self.deepspeed,
            ),
            *(
                self.cluster_name,
                self.cluster_json,
                self.model_json,
                self.model_name,
                self.environment,
                self.environment,
            ),
            *(self.node_list, self.schedule, self.checkpoint, self.command_line, self.describe),
        ]

    def make(self, number: int) -> Case:
        """Return the case of a number."""
        rng = random.Random(f"input {number}")
        return self.makers[number % len(self.makers)](rng)

    def _write(self, rng: random.Random, name: str, text: str) -> str:
        if rng.random() < 0.06:
            return str(rng.choice(self.odd))
        path = self.folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return str(path)

    def _json(self, rng: random.Random, name: str, tree: Any) -> str:
        if rng.random() < 0.5:
            return self._write(rng, name, nasty.as_json(rng, nasty.mutated_tree(rng, tree)))
        return self._write(rng, name, nasty.mutated_text(rng, json.dumps(tree)))

    def toml(self, rng: random.Random) -> Case:
        tree = rng.random() < 0.6
        text = (
            nasty.as_toml(nasty.mutated_tree(rng, CONFIG)) if tree else nasty.mutated_text(rng, nasty.as_toml(CONFIG))
        )
        return Case("TOML file", ["train", self._write(rng, "fuzz.toml", text)])

    def overrides(self, rng: random.Random) -> Case:
        arguments = ["train", str(self.config)]
        for _ in range(rng.randrange(1, 4)):
            section = rng.choice(list(CONFIG))
            key = f"{section}.{rng.choice(list(CONFIG[section]))}"
            value = rng.choice((nasty.argument, nasty.number_text))(rng)
            plain = (
                f"{key}={value}"
                if rng.random() < 0.7
                else rng.choice((f"{nasty.argument(rng)}={value}", nasty.argument(rng)))
            )
            arguments += ["--set", plain]
        return Case("--set", arguments)

    def plan_line(self, rng: random.Random) -> Case:
        keys = (
            "dp",
            "tp",
            "pp",
            "cp",
            "zero",
            "shard",
            "micro_batches",
            "schedule",
            "virtual",
            "recompute",
            "bucket_bytes",
            "whole_below",
        )
        words = [
            f"{rng.choice(keys)}={rng.choice((nasty.number_text, nasty.argument))(rng)}"
            for _ in range(rng.randrange(1, 4))
        ]
        line = ",".join(words) if rng.random() < 0.6 else nasty.mutated_text(rng, "dp=2,tp=2,pp=2,micro_batches=4")
        line = line.replace("\0", "\x01")[:100_000]
        return Case("plan's line", ["train", str(self.config), f"--plan={line}", *self._devices(rng)])

    def _devices(self, rng: random.Random) -> list[str]:
        return [f"--devices={rng.choice((nasty.number_text(rng), '2', '4'))}"] if rng.random() < 0.3 else []

    def plan_json(self, rng: random.Random) -> Case:
        return Case("plan's JSON", ["train", str(self.config), "--plan", self._json(rng, "plan.json", self.plan)])

    def deepspeed(self, rng: random.Random) -> Case:
        path = self._json(rng, "ds.json", DEEPSPEED)
        return Case("DeepSpeed JSON", ["train", str(self.config), "--plan", path, *self._devices(rng)])

    def cluster_name(self, rng: random.Random) -> Case:
        plain = rng.choice(("8xh100-sxm", "2x8xa100-80g + 4x8xh100-sxm", "4x8xl40s@roce-200", "cpu"))
        name = nasty.mutated_text(rng, plain) if rng.random() < 0.7 else nasty.text(rng)
        return Case(
            "cluster's name", ["plan", "gpt2", f"--cluster={name}".replace("\0", "")[:100_000], "--global-batch", "64"]
        )

    def cluster_json(self, rng: random.Random) -> Case:
        tree = self.cluster if rng.random() < 0.7 else [self.cluster, self.cluster]
        path = self._json(rng, "cluster.json", tree)
        return Case("cluster's JSON", ["plan", "gpt2", "--cluster", path, "--global-batch", "64"])

    def model_json(self, rng: random.Random) -> Case:
        path = self._json(rng, "model.json", rng.choice((HUGGING_FACE, self.model)))
        return Case("model's JSON", ["plan", path, "--cluster", "8xh100-sxm", "--global-batch", "64"])

    def model_name(self, rng: random.Random) -> Case:
        name = rng.choice((nasty.argument(rng).replace(":", ""), "gpt2", "llama3-8b"))
        options = [
            f"--{name}={nasty.number_text(rng)}" for name in ("global-batch", "sequence", "top") if rng.random() < 0.7
        ]
        return Case("model's name", ["plan", name, "--cluster", "8xh100-sxm", *options])

    def environment(self, rng: random.Random) -> Case:
        names = rng.choice((_SET_BY_LAUNCHERS, _SLURM))
        plain = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NODELIST": "n[1-2]",
        }
        variables = {name: plain.get(name, "0") for name in names}
        for name in rng.sample((*names, *_OURS), rng.randrange(1, 4)):
            variables[name] = rng.choice((nasty.text, nasty.number_text))(rng)
        if rng.random() < 0.2:
            variables.pop(rng.choice(names), None)
        return Case("environment", ["train", str(self.config)], variables)

    def node_list(self, rng: random.Random) -> Case:
        variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
        plain = rng.choice(("login,node[01-03,07]-ib", "r[1-2]n[08-09]", "n[1-100][1-100][1-100]"))
        variables["SLURM_NODELIST"] = nasty.mutated_text(rng, plain) if rng.random() < 0.8 else nasty.text(rng)
        return Case("node list", ["train", str(self.config)], variables)

    def schedule(self, rng: random.Random) -> Case:
        kind = rng.choice(("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", nasty.argument(rng)))
        number = lambda: rng.choice((nasty.number_text(rng), str(rng.randrange(1, 2000)), str(rng.randrange(1, 40))))  # noqa: E731
        return Case("schedule", ["schedule", f"--stages={number()}", f"--micro-batches={number()}", f"--kind={kind}"])

    def checkpoint(self, rng: random.Random) -> Case:
        place = rng.choice((str(rng.choice(self.odd)), nasty.argument(rng), str(self.folder)))
        step = [f"--step={nasty.number_text(rng)}"] if rng.random() < 0.4 else []
        return Case("checkpoint", ["checkpoint", rng.choice(("inspect", "verify")), *step, "--", place])

    def command_line(self, rng: random.Random) -> Case:
        words = (
            "train",
            "plan",
            "verify",
            "schedule",
            "checkpoint",
            "describe",
            "inspect",
            "--plan",
            "--set",
            "--cluster",
            "--json",
            "--top",
        )
        return Case(
            "command line", [rng.choice((rng.choice(words), nasty.argument(rng))) for _ in range(rng.randrange(1, 6))]
        )

    def describe(self, rng: random.Random) -> Case:
        name = rng.choice((nasty.argument(rng).replace(":", ""), "gpt2", str(rng.choice(self.odd))))
        options = [
            f"--{option}={nasty.number_text(rng)}" for option in ("batch-size", "sequence") if rng.random() < 0.5
        ]
        return Case("describe", ["describe", *options, "--", name])
