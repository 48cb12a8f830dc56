"""Units whose code names what reads values."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.may_look import units_that_may_look


class Late(nn.Module):
    """Reads a value on a branch alone, inside of a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.is_late = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(row.item() for row in x[:, 0]) if self.is_late else self.line(x)


class Plain(nn.Module):
    """Reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.size = int("3")
        self.line = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).relu()


def test_a_branch_that_reads_is_seen_in_the_code() -> None:
    module = nn.Sequential(Plain(), nn.Sequential(Late(), Plain()), nn.Linear(2, 2))
    assert list(units_that_may_look(module, ["0", "1", "1.1", "2"])) == ["1"]
