"""Several modules, or several optimizers, where one is usual: the pipeline stages of a rank, an optimizer for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from casckpt.errors import InvalidInput
from casckpt.frontends.training_state.names import plain_name

AnyModel: TypeAlias = nn.Module | Sequence[nn.Module]
"""A model, or the parts of one that this rank has: their plain names are those of one model."""
AnyOptimizer: TypeAlias = Optimizer | Sequence[Optimizer]
"""An optimizer, or several that share out the parameters."""


def as_model(model: AnyModel) -> nn.Module:
    """One module. Raises InvalidInput for what is none."""
    if isinstance(model, nn.Module):
        return model
    parts: list[Any] = list(model) if isinstance(model, list | tuple) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise InvalidInput(f"a model is a torch.nn.Module or a list of them, not {type(model).__name__}")
    return parts[0] if len(parts) == 1 else Parts(parts)


def as_optimizers(optim: AnyOptimizer | None) -> tuple[Optimizer, ...]:
    """All of them; none for None. Raises InvalidInput for what has no parameter groups.

    The layer-wise dummy of Transformers stands for those of its ``optimizer_dict``, which step in hooks.
    """
    if optim is None:
        return ()
    given: tuple[Any, ...] = tuple(optim) if isinstance(optim, list | tuple) else (optim,)
    of_layers = [getattr(one, "optimizer_dict", None) for one in given]
    found = tuple(
        chain.from_iterable(
            layers.values() if isinstance(layers, Mapping) else (one,)
            for one, layers in zip(given, of_layers, strict=True)
        )
    )
    for one in found:
        if not hasattr(one, "param_groups"):
            raise InvalidInput(f"an optimizer is a torch.optim.Optimizer or a list of them, not {type(one).__name__}")
    return found


class Parts(nn.Module):
    """Parts of one model, under the plain names that they have in it.

    They are no children of this module: plain names are found part by part, by walking each of them.
    """

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Of all parts."""
        return chain.from_iterable(part.named_modules(memo, prefix, remove_duplicate) for part in self.parts)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all parts, by plain names."""
        for part in self.parts:
            for name, parameter in part.named_parameters(prefix, recurse, remove_duplicate):
                yield plain_name(part, name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Of all parts, by plain names."""
        for part in self.parts:
            for name, buffer in part.named_buffers(prefix, recurse, remove_duplicate):
                yield plain_name(part, name), buffer

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> OrderedDict[str, Any]:  # type: ignore[override]  # no overloads
        """Of all parts, by plain names. Raises InvalidInput for a name that two parts have."""
        found: OrderedDict[str, Any] = OrderedDict()
        for part in self.parts:
            for key, value in part.state_dict(prefix=prefix, keep_vars=keep_vars).items():
                name = plain_name(part, key)
                if found.setdefault(name, value) is not value:
                    raise InvalidInput(
                        f"two parts of the model have the name {name!r}. Rename one; or, if these are several models, "
                        'give a dict of them and their optimizers, as {"generator": g, "discriminator": d, ...}',
                        key=name,
                    )
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Give each part its own."""
        for part in self.parts:
            own = part.state_dict(keep_vars=True)  # with the versions of its modules
            names = {key: plain_name(part, key) for key in own}
            for key, name in names.items():
                if name in state_dict:
                    own[key] = state_dict[name]
                else:
                    del own[key]
            part.load_state_dict(own, strict=strict, assign=assign)
