"""A model under a plan is laid over processes: a copy or a pickle of it has no meaning, and says so."""

from __future__ import annotations

from typing import Any, NoReturn

from meshwright.errors import ApplyError

__all__: list[str] = []


class Uncopied:
    """Refuses `copy` and `pickle`, which would end in errors about locks and hooks."""

    def __copy__(self) -> NoReturn:
        self._refuse_copy("copy.copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy("pickle")

    def _refuse_copy(self, how: str) -> NoReturn:
        raise ApplyError(
            f"{how} of a {type(self).__name__}: it is one rank's part of a model, with its place among the others",
            fix="model.full_state_dict() for the values, on every rank; mw.save_checkpoint(model, directory, step=n) for a file; "
            "copy.deepcopy(module) before apply_plan for a second model",
        )
