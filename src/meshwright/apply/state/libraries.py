"""Libraries, whose code is not searched for state: known by name, or installed packages that define nothing of the model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

__all__: list[str] = []

_LIBRARIES = (
    frozenset({"torch", "torchvision", "torchaudio", "transformers", "timm", "diffusers", "torch_geometric"})
    | frozenset({"numpy", "scipy", "meshwright", "builtins"})
    | sys.stdlib_module_names
) - {"__main__"}
_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_library(name: str | None) -> bool:
    """Tell whether a module, by its name, is of a library that is known by name."""
    return name is not None and name.partition(".")[0] in _LIBRARIES


class Home:
    """The packages of a model's own code: all others that are installed are libraries.

    Args:
        module: The model, if any.
        functions: Further code: the loss.
    """

    def __init__(self, module: nn.Module | None, functions: Sequence[Any] = ()) -> None:
        kinds = {type(child) for child in (() if module is None else module.modules())}
        plain = [getattr(function, "func", function) for function in functions]
        owners = [*kinds, *plain, *(type(function) for function in plain)]
        self._beside = {_family(kind.__module__) for kind in kinds} - {"torch.nn"}
        self._packages = {str(getattr(owner, "__module__", None) or "").partition(".")[0] for owner in owners}

    def has_beside(self, name: str | None) -> bool:
        """Tell whether a module, by its name, is of the library and of the part of it that the model's classes are of.

        Code there may draw for the model, such as transformers' masks of audio; its state is not searched for.
        """
        return name is not None and _family(name) in self._beside

    def is_foreign(self, name: str | None) -> bool:
        """Tell whether a module, by its name, is of a library."""
        if name is None or is_library(name):
            return name is not None
        package = name.partition(".")[0]
        return package not in self._packages and _is_installed(package)


def _family(name: str) -> str:
    return ".".join(name.split(".")[:2])


@functools.cache
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    folders = [Path(place).parent for place in getattr(module, "__path__", ())]
    file = Path(getattr(module, "__file__", None) or "")
    folders.append(file.parent.parent if file.stem == "__init__" else file.parent)
    return any(not _FOLDERS.isdisjoint(folder.parts) or _is_installed_into(folder) for folder in folders)


@functools.cache
def _is_installed_into(folder: Path) -> bool:
    """Tell whether an installer has put packages into a folder, as `pip install --target` does."""
    return any(True for _ in folder.glob("*.dist-info"))
