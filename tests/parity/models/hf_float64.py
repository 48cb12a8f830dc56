"""Modules of `transformers` as they are shipped, but for one thing: where their source says float32, the copy says float64.

Their code computes parts in float32 whatever the weights are: norms, softmax, rotary angles, routers, the own loss. With
that, two orders of the same sums differ by 1e-7, and a comparison within 1e-11 could not be made.

A copy of the source, rather than a mode or a patch around a forward: it is ordinary code, which no guard, trace, thread or
repeated forward tells from any other user's. A TorchFunctionMode would be seen, and every call under it would run whole.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
from types import CodeType, ModuleType

_SUFFIX = "_in_float64"
_NAMES = {"float32": "float64", "float": "double"}  # attributes: of torch, and the method of tensors


class _Renaming(ast.NodeTransformer):
    """Has every attribute of these names be the other; `float` by itself is Python's, and stays."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = _NAMES.get(node.attr, node.attr)
        return node


class Float64Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source, changed so."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the changed source; the bytecode that lies beside the file is that of the other."""
        tree = _Renaming().visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)


def in_float64(name: str) -> ModuleType:
    """Return the copy of a module, with this process's one for each name.

    Args:
        name: A module's full name; the copy stands beside it, so that its relative imports find what the other's do.
    """
    copy_name = name + _SUFFIX
    if copy_name not in sys.modules:
        original = importlib.import_module(name)
        spec = importlib.util.spec_from_loader(copy_name, Float64Loader(copy_name, str(original.__file__)))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[copy_name] = module
        spec.loader.exec_module(module)
    return sys.modules[copy_name]
