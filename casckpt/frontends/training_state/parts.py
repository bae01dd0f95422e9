"""Lists of modules and of optimizers, such as the pipeline stages of a rank with an optimizer for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput

AnyModel: TypeAlias = nn.Module | Sequence[nn.Module]
"""A model, or the parts of one model that this rank has."""
AnyOptimizer: TypeAlias = Optimizer | Sequence[Optimizer]
"""An optimizer, or several optimizers that share the parameters."""


def as_model(model: AnyModel) -> nn.Module:
    """Return one module. Raises InvalidInput for a value that is neither a module nor a list of modules."""
    if isinstance(model, nn.Module):
        return model
    parts: list[Any] = list(model) if isinstance(model, list | tuple) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise InvalidInput(f"a model is a torch.nn.Module or a list of them, not {type(model).__name__}")
    return parts[0] if len(parts) == 1 else Parts(parts)


def as_optimizers(optim: AnyOptimizer | None) -> tuple[Optimizer, ...]:
    """Return all optimizers; an empty tuple for None. Raises InvalidInput for a value without parameter groups.

    The layer-wise dummy of Transformers is replaced by the optimizers in its ``optimizer_dict``, which step in hooks.
    """
    given: list[Any] = [*optim] if isinstance(optim, list | tuple) else [] if optim is None else [optim]
    optimizers = list[Any]()
    for optimizer in given:
        layers = getattr(optimizer, "optimizer_dict", None)
        optimizers += layers.values() if isinstance(layers, Mapping) else [optimizer]
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            kind = type(optimizer).__name__
            raise InvalidInput(f"an optimizer is a torch.optim.Optimizer or a list of them, not {kind}")
    return tuple(optimizers)


class Parts(nn.ModuleList):
    """Parts of one model. `plain_name` returns their names in the model."""

    def state_dict(self, *, keep_vars: bool = False) -> OrderedDict[str, Any]:  # type: ignore[override]  # no overloads
        """Return the state_dict of each part, with its number before each key."""
        parts = ((number, part.state_dict(keep_vars=keep_vars)) for number, part in self.named_children())
        return OrderedDict((f"{number}.{key}", value) for number, own in parts for key, value in own.items())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load the keys of each part into it."""
        for number, part in self.named_children():
            own = part.state_dict(keep_vars=True)  # includes the versions of its modules
            for key in [*own]:
                if f"{number}.{key}" in state_dict:
                    own[key] = state_dict[f"{number}.{key}"]
                else:
                    del own[key]
            part.load_state_dict(own, strict=strict, assign=assign)
