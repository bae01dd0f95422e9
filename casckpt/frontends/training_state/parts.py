"""Lists of modules and of optimizers, such as a rank's pipeline stages with an optimizer for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput

AnyModel: TypeAlias = nn.Module | Sequence[nn.Module]
"""A model, or this rank's parts of one model."""
AnyOptimizer: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]
"""An optimizer, or several optimizers that share the parameters."""


def as_model(model: AnyModel) -> nn.Module:
    """Return ``model`` as one module.

    Raises InvalidInput for a value that is neither a module nor a list of modules.
    """
    if isinstance(model, nn.Module):
        return model
    parts: list[Any] = list(model) if isinstance(model, list | tuple) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise InvalidInput(f"a model must be a torch.nn.Module or a list of these, not {type(model).__name__}")
    return parts[0] if len(parts) == 1 else Parts(parts)


def as_optimizers(optim: AnyOptimizer | None) -> tuple[Optimizer, ...]:
    """Return ``optim`` as a tuple of optimizers, empty for None.

    The keys of a dict do not count. Raises InvalidInput for a value without parameter groups. The layer-wise dummy
    optimizer of Transformers is replaced with the optimizers in its ``optimizer_dict``, whose steps run in hooks.
    """
    if isinstance(optim, Mapping):
        optim = [*optim.values()]
    given: list[Any] = [*optim] if isinstance(optim, list | tuple) else [] if optim is None else [optim]
    optimizers = list[Any]()
    for optimizer in given:
        layers = getattr(optimizer, "optimizer_dict", None)
        optimizers += layers.values() if isinstance(layers, Mapping) else [optimizer]
    for optimizer in optimizers:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            kind = type(optimizer).__name__
            why = f"an optimizer must be a torch.optim.Optimizer, or a list or dict of these, not {kind}"
            raise InvalidInput(f"{why}. Of a wrapper, pass the optimizer in it here, and the wrapper in train_state")
    return tuple(optimizers)


class Several(Optimizer):
    """Several optimizers as one that `as_optimizers` takes apart. Its groups are theirs."""

    def __init__(self, optims: Sequence[Optimizer]) -> None:
        self.optimizer_dict = dict(enumerate(optims))
        self.param_groups = [group for one in optims for group in one.param_groups]


class Parts(nn.ModuleList):
    """The parts of one model. `plain_name` removes the part numbers from their names."""

    def state_dict(self, *, keep_vars: bool = False) -> OrderedDict[str, Any]:  # type: ignore[override]  # no overloads
        """Return the state_dict of all parts, with the part's number before each key."""
        parts = ((number, part.state_dict(keep_vars=keep_vars)) for number, part in self.named_children())
        return OrderedDict((f"{number}.{key}", value) for number, own in parts for key, value in own.items())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load into each part the keys that belong to it."""
        for number, part in self.named_children():
            own = part.state_dict(keep_vars=True)  # includes the module versions
            for key in [*own]:
                if f"{number}.{key}" in state_dict:
                    own[key] = state_dict[f"{number}.{key}"]
                else:
                    del own[key]
            part.load_state_dict(own, strict=strict, assign=assign)
