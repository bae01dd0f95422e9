"""The state that torch's own optimizers keep for a parameter, by name, as no step is ever taken to find out.

An optimizer of somebody else may keep anything, and is given what was saved. What a user adds to the state of one of
torch's is the user's: it is loaded, and proves no other kind of optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from casckpt.errors import Mismatch

_ALWAYS = {
    "Adadelta": "step square_avg acc_delta",
    "Adafactor": "step",
    "Adagrad": "step sum",
    "Adam": "step exp_avg exp_avg_sq",
    "AdamW": "step exp_avg exp_avg_sq",
    "Adamax": "step exp_avg exp_inf",
    "ASGD": "step eta mu ax",
    "LBFGS": "func_evals n_iter",
    "Muon": "momentum_buffer",
    "NAdam": "step mu_product exp_avg exp_avg_sq",
    "RAdam": "step exp_avg exp_avg_sq",
    "RMSprop": "step square_avg",
    "Rprop": "step prev step_size",
    "SGD": "",
    "SparseAdam": "step exp_avg exp_avg_sq",
}
_AT_TIMES = {
    "Adafactor": "row_var col_var variance",
    "LBFGS": "al d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss",
    "SGD": "momentum_buffer",
}
_WITH = {  # an option that is on: what it needs
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}


@dataclass(frozen=True)
class StateKind:
    """A kind of optimizer. ``name``: of the class of torch.optim whose step it takes."""

    name: str

    @classmethod
    def of(cls, optim: Optimizer) -> StateKind | None:
        """None for one that takes steps in its own way."""
        step = type(optim).step
        name = step.__qualname__.partition(".")[0]
        if not _is_torchs(step) or name not in _ALWAYS:
            return None
        return cls(name)

    def needs(self, options: Mapping[str, Any]) -> set[str]:
        """The names without which a step fails, with these options of the group."""
        optional = _WITH.get(self.name, {})
        return {*_ALWAYS[self.name].split(), *(name for option, name in optional.items() if options.get(option))}

    def keeps(self) -> set[str]:
        """All names that there may be."""
        optional = _WITH.get(self.name, {})
        return {*_ALWAYS[self.name].split(), *_AT_TIMES.get(self.name, "").split(), *optional.values()}

    def check(self, saved: Collection[str], options: Mapping[str, Any], key: str, where: str) -> None:
        """Raise Mismatch if state of these names is not enough for a step, or all that another kind keeps.

        ``key``: the parameter whose state it is.
        """
        names = set(saved)
        lacking = sorted(self.needs(options) - names)
        others = () if names <= self.keeps() else map(StateKind, _ALWAYS)
        kinds = [kind.name for kind in others if kind.needs({}) <= names <= kind.keeps()]
        is_other = bool(kinds) and names != {"step"}  # users count, too
        if lacking or is_other:
            found = f"it lacks {', '.join(map(repr, lacking))}" if lacking else f"it is that of {' or '.join(kinds)}"
            raise Mismatch(
                f"the optimizer's state of {key!r} in {where} is not what {self.name} keeps: {found}. Make the same "
                "optimizer as was saved, with the same options, or load the model alone (optim=None; from a dict, "
                "leave the optimizer out)",
                key=key,
            )


def _is_torchs(thing: Any) -> bool:
    return f"{thing.__module__}.".startswith("torch.optim.")
