"""Import hook: code of `transformers` and its kind, compiled with float64 wherever its source says float32.

Their code computes parts in float32 whatever the weights are: norms, softmax, rotary angles, routers, losses. With that, two
orders of the same sums differ by 1e-7, and nothing closer could be told. The hook changes attributes of two names in the source,
before it is compiled: `float32` becomes `float64`, `float` becomes `double`. The result is ordinary code, which no guard, trace
or thread tells from any other user's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

from tests.parity.models.hf_float64 import Float64Loader

_MODULES = re.compile(
    r"transformers\.(models\.\w+\.modeling_|modeling_rope_utils|modeling_layers|masking_utils|activations|loss\."
    r"|pytorch_utils|time_series_utils|integrations\.(sdpa_attention|moe|eager_paged|finegrained))"
    r"|(timm|diffusers|torchvision)\.(models|layers)\b|(mambapy|litgpt|chronos|enformer_pytorch|hyper_connections)\."
)
_WORDS = re.compile(rb"\.float\b|\.float32\b")


class _Loader(Float64Loader):
    def get_code(self, fullname: str) -> CodeType | None:
        if not _WORDS.search(self.get_data(self.path)):
            return SourceFileLoader.get_code(self, fullname)
        return super().get_code(fullname)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _MODULES.match(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """Put the hook in place; modules that are imported already stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
