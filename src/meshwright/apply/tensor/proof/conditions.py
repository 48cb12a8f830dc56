"""Conditions of a layout's proof: each recorded call of its scope, in training mode and in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import ScopeValues
from meshwright.apply.tensor.proof.shards_against_whole import Disproof, DisprovedError, in_words
from meshwright.apply.tensor.search.trace import MAX_CALLS, Call
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout

__all__: list[str] = []


class Conditions:
    """A scope, and the calls and modes in which a layout of it must equal the whole.

    The first experiment is prepared at once and finds most errors; the others are prepared when it has passed.

    Args:
        scope: The module.
        calls: Its calls, which differ in more than values.
        num_tp_ranks: Ranks [count].
        values: Values of the scope that other conditions use, too.

    Raises:
        DisprovedError: There are too many calls.
        Exception: Any exception of the module when it runs alone with the first call.
    """

    def __init__(
        self, scope: nn.Module, calls: Sequence[Call], num_tp_ranks: int, values: ScopeValues | None = None
    ) -> None:
        if len(calls) > MAX_CALLS:
            raise DisprovedError(
                f"it is called with more than {MAX_CALLS} kinds of arguments, and each would have to be proven"
            )
        self._scope = scope
        self._num_tp_ranks = num_tp_ranks
        flags = {module.training for module in scope.modules()}
        # The recorded modes first; then all modules in training mode, and all in eval mode, where that is another.
        modes = [None, *({True, False} - flags if len(flags) == 1 else (True, False))]
        self._pending = [(call, mode) for mode in modes for call in calls]
        self._values = values or ScopeValues(scope)
        self._made = [self._make(*self._pending.pop(0))]

    def _make(self, call: Call, mode: bool | None) -> Experiment:
        return Experiment(self._scope, call, self._num_tp_ranks, mode=mode, values=self._values)

    def _experiments(self) -> Iterator[Experiment]:
        yield from list(self._made)
        while self._pending:
            call, mode = self._pending[0]
            try:
                experiment = self._make(call, mode)
            except Exception as error:  # whatever the module raises in this mode
                kind = {None: "", True: " in training mode", False: " in eval mode"}[mode]
                raise DisprovedError(
                    f"it cannot be run by itself{kind} as it is called, which a proof needs: {in_words(error)}"
                ) from error
            self._pending.pop(0)
            self._made.append(experiment)
            yield experiment

    def prove(self, region: Region) -> Region:
        """Return the region, completed with its partial parameters and its results in slices, or raise DisprovedError."""
        proven = self._made[0].prove(region)
        return proven.replace(partial=self.check(TensorLayout(regions=(proven,)), known=proven.partial))

    def check(
        self, layout: TensorLayout, *, known: tuple[str, ...] | None = None, on_slices: bool = False
    ) -> tuple[str, ...]:
        """Return the parameters whose gradients have to be summed, the same under all calls and modes.

        Args:
            layout: The layout to prove.
            known: The result of the first experiment, if it has run.
            on_slices: Whether the whole scope runs on slices. A parameter without gradient in all experiments (an expert that no
                token chose) then disproves the layout: they do not show whether its gradient would be a term.

        Raises:
            DisprovedError: Something differs, or a gradient is a term in one experiment and whole in another.
        """
        partial: dict[str, None] = {}
        whole: set[str] = set()
        for index, experiment in enumerate(self._experiments()):
            own = known if known is not None and not index else experiment.check(layout)
            experiment.forget()
            partial |= dict.fromkeys(own)
            whole |= experiment.names - set(own) - experiment.idle
        both = sorted(whole & partial.keys())
        idle = sorted(
            set.intersection(*(experiment.idle for experiment in self._made)) - partial.keys() - layout.cuts.keys()
        )
        if on_slices and idle:
            raise DisprovedError(f"{idle[0]} had no gradient, so that it is not known whether it would be a term")
        if both:
            raise DisprovedError(
                f"the gradient of {both[0]} is a rank's term in one call, and the whole in another", Disproof.GRADIENT
            )
        return tuple(partial)
