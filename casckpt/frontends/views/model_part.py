"""The model within a checkpoint, found by the layouts in which trainings save; and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.tree import Node, children, join, leaves
from casckpt.frontends.training_state.names import WRAPPERS

_MODEL = frozenset(("model", "module", "state_dict", "model_state_dict", "model_state"))
_OPTIMIZER = frozenset((
    "optim", "optims", "optimizer", "optimizers", "optim_state", "optim_state_dict", "optimizer_state",
    "optimizer_states", "optimizer_state_dict", "optimizer_state_dicts",
))  # fmt: skip
_TRAINING = _OPTIMIZER | frozenset((
    "scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict",
    "scaler", "grad_scaler", "rng", "rng_state", "rng_states", "dataloader", "dataset", "callbacks", "loops",
    "train", "train_state", "trainer", "trainer_state", "training_state", "transformers", "lightning",
))  # fmt: skip
"""What stands beside a model in a checkpoint of a training, at its top. Of flat keys only those of an optimizer count:
a model may well have a part that it calls a scaler."""
_LIGHTNING = ("lightning", "pytorch-lightning_version")  # of a store; of an imported file
_DDP = "module"
_INNER = frozenset(WRAPPERS.values()) - {_DDP}  # no model has parts of these names
_ADAPTERS = ("base_layer", "modules_to_save", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MOST = 8


def model_part(tree: Node, keys: Collection[str], where: str) -> tuple[str, list[str]]:
    """The keys of the model, and what they begin with: "model.", "" where its names stand at the top, ...

    ``keys``: of the tensors in question. Raises MissingKey if none of them is of a model, InvalidInput naming the
    choices where it cannot be told which.
    """
    parts = _parts(tree, set(keys))
    found = sorted(prefix for prefix in parts if _head(prefix) not in _TRAINING)
    if any(prefix.removesuffix(".") in _MODEL for prefix in found) and not any("." in key for key in parts.get("", ())):
        found = [prefix for prefix in found if prefix]  # beside the model: a loss, a step
    if not found:
        more = f", but something below {', '.join(parts)}; give --strip-prefix if that is one" if parts else ""
        raise MissingKey(f"{where} holds no weights of a model{more}; `casckpt show --tensors` lists what it holds")
    if len(found) > 1 or (found == [""] and len(parts) > 1 and _is_either(tree, parts[""])):
        raise _unclear(where, [prefix for prefix in found if prefix] + [_first(key) for key in parts.get("", ())])
    prefix = found[0]
    if not any(element in _LIGHTNING for element, _ in children(tree)):
        return prefix, parts[prefix]
    below = prefix + _attribute(prefix, parts[prefix], where)
    return below, [key for key in parts[prefix] if key.startswith(below)]


def _is_either(tree: Node, names: Sequence[str]) -> bool:
    """Whether what looks like a training may be of the model, or the first part of all ``names`` be no name."""
    is_flat = any(_head(str(element)) in _OPTIMIZER for element, node in children(tree) if isinstance(node, int))
    return is_flat or all(name.startswith("model.") for name in names)


def _head(key: str) -> str:
    return key.partition(".")[0]


def _parts(tree: Node, keys: Collection[str]) -> dict[str, list[str]]:
    """The keys by what they begin with: the container at the top that holds them, or "" where they stand there.

    A flat key of an optimizer at the top, as "optimizer.state.w", counts as what it would be if it were nested.
    """
    parts: dict[str, list[str]] = {}
    for element, node in children(tree):
        below = [key for path, _ in leaves(node, (element,)) if (key := join(path)) in keys]
        if not isinstance(node, int):
            prefix = f"{element}."
        else:
            prefix = _first(str(element)) if _head(str(element)) in _OPTIMIZER else ""
        if below:
            parts.setdefault(prefix, []).extend(below)
    return parts


def _first(key: str) -> str:
    """The first part of a flat key, with its dot; all of a key without one."""
    head, dot, _ = key.partition(".")
    return head + dot


def _attribute(prefix: str, keys: Sequence[str], where: str) -> str:
    """Lightning's modules hold the model as an attribute, whose name stands before all of its names."""
    names = sorted({_first(key.removeprefix(prefix)) for key in keys})
    if len(names) > 1 or not names[0].endswith("."):
        raise _unclear(where, [prefix + name for name in names])
    return names[0]


def _unclear(where: str, choices: Sequence[str]) -> InvalidInput:
    named = [choice for choice in dict.fromkeys(choices) if choice.endswith(".")]
    more = ", ..." if len(named) > _MOST else ""
    ways = " or ".join(f"--strip-prefix {choice}" for choice in named[:_MOST])
    return InvalidInput(
        f"which part of {where} is the model cannot be told. Say it by {ways}{more}; or take tensors by --keys, and "
        "--strip-prefix '' for names as they are"
    )


def plain_names(names: Sequence[str]) -> list[str]:
    """``names`` of a model without the parts that stand for DDP, FSDP, activation checkpointing and torch.compile."""
    found = [".".join(part for part in name.split(".") if part not in _INNER) for name in names]
    while found and all(name.startswith(f"{_DDP}.") for name in found):
        found = [name.removeprefix(f"{_DDP}.") for name in found]
    return found


def check_no_adapters(names: Sequence[str], prefix: str) -> None:
    """Raise InvalidInput for the names of a model that adapters were put into: few classes know such names."""
    for name in names:
        if not set(_ADAPTERS).isdisjoint(name.split(".")):
            raise InvalidInput(
                f"{name!r} is of an adapter, or of a layer around which there is one, and a model that is made of its "
                "config.json has hardly such a name. Merge the adapter (merge_and_unload) before the save, or export "
                f"all tensors by --format safetensors; if it is the model's own name: --strip-prefix {prefix}",
                key=name,
            )
