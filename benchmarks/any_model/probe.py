"""Finds the recipe of each architecture: the first head, configuration and batch whose tiny model trains in plain torch.

python -m benchmarks.any_model.probe --out benchmarks/any_model/recipes.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.any_model import configs, finder, float64, proposals, recipes, vision

float64.install()

import torch  # noqa: E402

_MOST_PARAMETERS = 8_000_000
_LIMIT_S = 20


class _LateError(Exception):
    pass


def _late(*_: Any) -> None:
    raise _LateError(f"no model within {_LIMIT_S} s")


def find_recipe(model_type: str) -> dict[str, Any]:
    """Return the recipe of an architecture, or what stood in the way of each head."""
    import transformers

    problems: list[str] = []
    try:
        cls = transformers.CONFIG_MAPPING[model_type]
        variants = configs.variants(cls)
    except Exception as error:
        return {"type": model_type, "problem": _text(error)}
    for fields in variants:
        for kind, name in recipes.heads_of(model_type):
            try:
                recipe = _try_head(cls, model_type, kind, name, fields)
            except _LateError:
                raise
            except Exception as error:
                problems.append(f"{name}: {_text(error)}")
                continue
            if isinstance(recipe, dict):
                return {**recipe, "before": " | ".join(problems)[:400]} if problems else recipe
            problems.append(f"{name}: {recipe}")
    return {"type": model_type, "problem": " | ".join(dict.fromkeys(problems))[:900]}


def _try_head(cls: Any, model_type: str, kind: str, name: str, fields: dict[str, Any]) -> dict[str, Any] | str:
    recipe = {"type": model_type, "kind": kind, "class": name, "config": fields, "library": "transformers"}
    if kind in ("image", "audio", "video", "text"):
        recipe["num_labels"] = recipes.CLASSES
    sizes = _sizes_without_memory(recipe)
    if sum(map(math.prod, sizes)) > _MOST_PARAMETERS:
        smaller = configs.by_sizes(fields, cls, {size for shape in sizes for size in shape})
        if smaller != fields:
            recipe["config"] = smaller
            sizes = _sizes_without_memory(recipe)
    if sum(map(math.prod, sizes)) > _MOST_PARAMETERS:
        return f"{sum(map(math.prod, sizes))} parameters"
    torch.manual_seed(0)
    module = recipes.build_hf(recipe)
    if (packed := proposals.packing_of(module)) is not None:
        recipe["packed"] = packed
        module = recipes.build_hf(recipe)
    count = sum(p.numel() for p in module.parameters())
    if count > _MOST_PARAMETERS:
        return f"{count} parameters"
    problems = []
    for batch in proposals.propose_batches(module.config, module, kind):
        has_labels = any(entry[0] == "labels" for entry in batch)
        for loss in ("own", "outputs") if has_labels else ("outputs",):
            used = batch if loss == "own" else [entry for entry in batch if entry[0] != "labels"]
            found = _try_batch(module, {**recipe, "batch": used, "loss": loss, "parameters": count})
            if isinstance(found, dict):
                return found
            problems.append(found)
    return " / ".join(dict.fromkeys(problems))[:400] or "no inputs known"


def _sizes_without_memory(recipe: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters; none where it cannot be built without memory."""
    try:
        with torch.device("meta"):
            return [tuple(p.shape) for p in recipes.build_hf(recipe).parameters()]
    except _LateError:
        raise
    except Exception:  # code that reads values while it builds, or that the real build will say
        return []


def _try_batch(module: Any, recipe: dict[str, Any]) -> dict[str, Any] | str:
    try:
        losses = _run(module, recipe)
    except _LateError:
        raise
    except Exception as error:
        for changed in _with_image_tokens(module, recipe, str(error)):
            found = _try_batch(module, changed)
            if isinstance(found, dict):
                return found
        return _text(error)
    return {**recipe, **losses} if "seconds" in losses else losses["problem"]


def _with_image_tokens(module: Any, recipe: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Return recipes with as many placeholders among the words as the message says there are features."""
    found = re.search(r"tokens: (?:tensor\()?(\d+)\)?, features:? (?:tensor\()?(\d+)", text)
    config = getattr(module, "config", None)
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if found is None or token is None or any(entry[1] == "image tokens" for entry in recipe["batch"]):
        return []
    features = int(found[2])
    counts = [features // recipes.SAMPLES, features // (recipes.SAMPLES * configs.HIDDEN)]
    return [_with_tokens(recipe, token, count) for count in counts if 0 < count < 300]


def _with_tokens(recipe: dict[str, Any], token: int, count: int) -> dict[str, Any]:
    batch = []
    for name, kind, *facts in recipe["batch"]:
        longer = [*facts[:2], recipes.LENGTH + count] if kind == "ids" and len(facts) == 3 else facts
        batch.append([name, kind, *longer])
        if name == "input_ids":
            batch.append(["input_ids", "image tokens", token, count])
    return {**recipe, "batch": batch}


def _run(module: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    batch = recipes.make_batch(recipe, 0)
    module.zero_grad()
    begin = time.perf_counter()
    outputs = module(**batch)
    loss_fn = recipes.loss_of(recipe)
    loss = outputs.loss if loss_fn is None else loss_fn(outputs, batch)
    if loss is None:
        return {"problem": "no loss"}
    loss.backward()
    seconds = time.perf_counter() - begin
    reached = sum(p.numel() for p in module.parameters() if p.grad is not None)
    finite = bool(torch.isfinite(loss)) and all(
        bool(torch.isfinite(p.grad).all()) for p in module.parameters() if p.grad is not None
    )
    if not finite:
        return {"problem": "not finite"}
    if loss.dtype != torch.float64 or not reached:
        return {"problem": f"loss in {loss.dtype}, {reached} parameters with a gradient"}
    return {"seconds": round(seconds, 3), "reached": reached, "mixes": _mixes_samples(module)}


def _mixes_samples(module: Any) -> bool:
    return any("BatchNorm" in type(m).__name__ and "Frozen" not in type(m).__name__ for m in module.modules())


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:260]


def all_types() -> list[str]:
    """Return the architectures in drawn order: what is stopped has seen all kinds."""
    found: dict[str, None] = {}
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for _, name in recipes.HEADS:
        mapping = getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES")
        found.update(dict.fromkeys(mapping))
    found.update(dict.fromkeys(CONFIG_MAPPING_NAMES))
    return sorted(found, key=lambda name: hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of architectures")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--again", type=Path, help="recipes, of which those that have a problem are sought again")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    finder.prepare()
    vision.load_if_there()
    import transformers

    transformers.logging.set_verbosity_error()
    known = (
        {json.loads(line)["type"] for line in arguments.out.read_text().splitlines()}
        if arguments.out.exists()
        else set()
    )
    signal.signal(signal.SIGALRM, _late)
    end = time.monotonic() + 60 * arguments.minutes
    wanted = all_types()
    if arguments.again:
        rows = [json.loads(line) for line in arguments.again.read_text().splitlines()]
        wanted = [row["type"] for row in rows if "problem" in row and "no model within" not in row["problem"]]
    for model_type in wanted:
        if time.monotonic() > end:
            break
        if model_type in known or not re.fullmatch(arguments.only or ".*", model_type):
            continue
        signal.alarm(_LIMIT_S)
        try:
            row = find_recipe(model_type)
        except _LateError as error:
            row = {"type": model_type, "problem": str(error)}
        finally:
            signal.alarm(0)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            model_type,
            row.get("kind", ""),
            row.get("class", ""),
            row.get("seconds", ""),
            row.get("problem", ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
