"""What models return beside tensors."""

from __future__ import annotations

import collections
import dataclasses
import typing

from torch import Tensor, nn


@dataclasses.dataclass
class DataclassOutput:
    logits: Tensor
    extra: Tensor | None = None


class NamedOutput(typing.NamedTuple):
    logits: Tensor
    extra: Tensor | None


class AttributeOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of Hugging Face's models: a dictionary whose items are attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class OpaqueOutput:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class WithOutput(nn.Module):
    """Returns its logits in a container of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.Linear(7, 5)
        self.extra = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> object:
        logits, extra = self.body(x), self.extra(x)
        return {
            "dict": lambda: {"logits": logits, "extra": extra, "nothing": None},
            "dataclass": lambda: DataclassOutput(logits, extra),
            "attributes": lambda: AttributeOutput(logits=logits, extra=extra),
            "namedtuple": lambda: NamedOutput(logits, None),
            "nested": lambda: (None, ((logits, [extra]), None)),
            "opaque": lambda: OpaqueOutput(logits),
        }[self.kind]()
