"""Parameters that the model's own code sets are found by its methods."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.apply.state.assigned import assigned_parameters


class _Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(2, 2) for _ in range(4))
        self.d.weight.data.zero_()  # before training: it is no reason to keep it whole

    def reset_parameters(self) -> None:
        self.d.bias.data = self.d.bias.data * 0

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data = self.a.weight.data.clamp(0)
        self.b.bias.data.clamp_(0)
        largest = self.c.weight.data.abs().max()
        x = x * self.d.weight.data.mean()
        return self.c(self.b(self.a(x))) / largest


def test_assignments_and_writes_count_and_reads_do_not() -> None:
    module = nn.Sequential(_Sets(), nn.Linear(2, 2))
    found = assigned_parameters(module)
    assert [name for name, parameter in module.named_parameters() if id(parameter) in found] == [
        "0.a.weight",
        "0.b.bias",
    ]
