"""The draws of one trial forward, and its outputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwright._torch_dispatch import batches_of_one
from meshwright.apply.randomness.forward_draws import DrawNote, ForwardDraws
from meshwright.apply.randomness.philox import key_of
from meshwright.apply.randomness.probes import Probes, ProbesOfFactories
from meshwright.apply.randomness.python_calls import Counts, PythonCalls, Site, Turns
from meshwright.apply.randomness.python_seeding import calls_seeded
from meshwright.apply.randomness.sample_dims import Call, SiteDims
from meshwright.apply.randomness.single_numbers import near_end
from meshwright.apply.randomness.sites import StepDraws, in_forward, in_step
from meshwright.apply.state.outside import Outside
from meshwright.python_state import PythonState
from meshwright.run.draw_owners import OutputDims, owners_of, zeros_moved
from meshwright.run.losses.trial_forward import TrialOutcome
from meshwright.trees import tensors_in

__all__: list[str] = []

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

ENDS = {1: 0, 2: 1}
"""The end near which all single numbers are, by the number to which a trial's belong (`near_end`)."""

MakeStep = Callable[[Mapping[Call, SiteDims], int], contextlib.AbstractContextManager[StepDraws]]


class TrialDraws:
    """The draws of one trial forward, and its outputs.

    Args:
        module: The model.
        make_step: Gives the context of a step that draws with these dims, and numbers that belong to a number.
        first: The place of its first sample.
        num_samples: Its samples [count].
        dims: Known sample dims.
        chance: The number to which its random numbers belong.
        with_graph: Whether gradients are on, as in a step: code may look at that.
        turns: Of calls of Python's and NumPy's generators, each seeded by its place. None: they are counted, and their numbers
            come one after the other.
        output_dims: Of the outputs, where the samples of drawn elements are looked for; None: they are not.
        marked: Blocks of what calls draw that become NaNs, as for `Probes`.
        moves_zeros: Whether it runs with other numbers in place of parameters that are zero, as where samples are looked for.
    """

    def __init__(
        self,
        module: nn.Module,
        make_step: MakeStep,
        first: int,
        num_samples: int,
        *,
        dims: Mapping[Call, SiteDims],
        chance: int = 0,
        with_graph: bool = False,
        turns: Mapping[Site, Turns] | None = None,
        output_dims: OutputDims | None = None,
        marked: Mapping[Call, Tensor] | None = None,
        moves_zeros: bool = False,
    ) -> None:
        self._module = module
        self._make_step = make_step
        self._forward = ForwardDraws(first, num_samples)
        self._dims = dims
        self._chance = chance
        self._with_graph = with_graph
        self._turns = turns
        self._output_dims = output_dims
        self._marked = marked
        self._moves_zeros = moves_zeros or output_dims is not None
        self.notes: dict[Call, DrawNote] = {}
        self.outputs: list[Tensor] = []
        self.owners: dict[Call, Tensor] = {}
        """The sample that each drawn element has influence on, where it is looked for."""
        self._forward.notes = self.notes
        self.num_samples = num_samples
        self.marks: frozenset[int] = frozenset()
        """What torch's generator gave at each draw."""
        self.uses_python = False
        """Whether Python's or NumPy's generator has drawn."""
        self.python_end: PythonState | None = None
        """The states of both after it."""
        self.uses_own = False
        """Whether a generator that the model's code keeps has drawn."""
        self.is_unseen = False
        """Whether torch's generator has drawn, and no call was seen that did."""
        self.loss = math.nan
        self.outcome = TrialOutcome()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw by place inside the context; batch statistics, which mix samples, are left out."""
        for module in self._module.modules():
            if isinstance(module, _BATCH_NORMS):
                module.eval()
        names = {id(module): name for name, module in self._module.named_modules()}

        def count(module: nn.Module, _: Any) -> None:
            if id(module) in names:
                self._forward.module_calls[names[id(module)]] += 1

        # Trials begin with different states: equal marks are of a forward that seeds the generator.
        torch.default_generator.manual_seed(key_of(f"trial of {self.num_samples} from {self._forward.first}") >> 1)
        state, told = torch.get_rng_state(), list[str]()
        hook = register_module_forward_pre_hook(count)
        looks = self._output_dims is not None
        probes = self._forward.probes = Probes(self.notes, self._marked) if looks or self._marked else None
        try:
            with self._make_step(self._dims, self._chance) as step:
                step.on_unknown = told.append
                python, own = PythonState(), Outside.of(self._module).generator_states()
                try:
                    graph = torch.set_grad_enabled(self._with_graph)
                    near = near_end(ENDS.get(self._chance))
                    made = contextlib.nullcontext() if probes is None else ProbesOfFactories(probes)
                    with (
                        in_step(step),
                        in_forward(self._forward),
                        graph,
                        batches_of_one(),
                        self._seeded(step),
                        near,
                        made,
                        zeros_moved(self._module) if self._moves_zeros else contextlib.nullcontext(),
                    ):
                        yield
                finally:
                    self.marks, self.python_end = step.marks, PythonState()
                    self.uses_python = not python.is_like(self.python_end)
                    self.uses_own = Outside.of(self._module).generator_states() != own
                    is_seen = bool(self.notes or told)
                    self.is_unseen = not is_seen and not torch.equal(state, torch.get_rng_state())
        finally:
            hook.remove()
            if probes is not None:
                probes.leave()

    def _seeded(self, step: StepDraws) -> contextlib.AbstractContextManager[None]:
        place, is_seeded = (self._forward.first, self.num_samples), self._turns is not None
        self._forward.python = PythonCalls(step.text, step.names, *place, turns=self._turns or {}, is_seeded=is_seeded)
        return calls_seeded()

    @property
    def python_counts(self) -> Counts:
        """Its samples, and calls of Python's and NumPy's generators at each place in the code [count]."""
        return self.num_samples, {} if self._forward.python is None else self._forward.python.counts

    def draws_as_often_as(self, other: TrialDraws) -> bool:
        """Tell whether as many calls of Python's and NumPy's generators, which began alike, have given as many numbers.

        Where they have not, a call draws for all samples at once, and outputs that are alike are so by chance: no mask was drawn.
        Another number of calls is a loop's, which `varies_with_samples` sees.
        """
        if self._turns is not None or self.python_end is None or other.python_end is None:
            return True
        return self.python_counts[1] != other.python_counts[1] or self.python_end.is_like(other.python_end)

    @property
    def is_sound(self) -> bool:
        """Whether it has run to the end, with finite outputs; with all single numbers near an end code may do neither."""
        return self.outcome.error is None and all(bool(tensor.isfinite().all()) for tensor in self.outputs)

    def take(self, outputs: Any) -> None:
        """Keep the outputs."""
        found = [tensor for tensor in tensors_in(outputs) if type(tensor) is Tensor]
        if self._output_dims is not None and self._forward.probes is not None:
            probes = self._forward.probes.of_calls
            self.owners = owners_of(found, self._output_dims, probes, self.num_samples)
        self.outputs = [tensor.detach() for tensor in found]
