"""Finds the model in a checkpoint by the layouts of common frameworks, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.tree import Node, Wrapper, children, join, leaves
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
"""Top-level keys that a training checkpoint has next to a model.

Among flat keys, only those of an optimizer count, because a model may have a part named "scaler".
"""
_LIGHTNING = ("lightning", "pytorch-lightning_version")  # saved by Lightning, or imported from its file
_DDP = "module"
_INNER = frozenset(WRAPPERS.values()) - {_DDP}  # models never have parts with these names
_ADAPTERS = ("base_layer", "modules_to_save", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MOST = 8


def model_part(tree: Node, keys: Collection[str], where: str) -> tuple[str, list[str]]:
    """Return the prefix of the model's keys, and the keys themselves. The prefix is "" for a model at the top level.

    ``keys``: the tensors to choose from. Raises MissingKey if none of them belongs to a model, and InvalidInput,
    naming the choices, if several parts may be the model.
    """
    parts = _parts(tree, set(keys))
    choices = sorted(prefix for prefix in parts if _head(prefix) not in _TRAINING)
    has_model = any(prefix.removesuffix(".") in _MODEL for prefix in choices)
    if has_model and not any("." in key for key in parts.get("", ())):
        choices = [prefix for prefix in choices if prefix]  # values next to the model, such as a loss or a step
    if not choices:
        more = f", but keys below {', '.join(parts)}; pass --strip-prefix if one of these is a model" if parts else ""
        raise MissingKey(f"{where} does not hold a model's weights{more}; `casckpt show --tensors` lists its contents")
    if len(choices) > 1 or (choices == [""] and len(parts) > 1 and _is_either(tree, parts[""])):
        raise _unclear(where, [prefix for prefix in choices if prefix] + [_first(key) for key in parts.get("", ())])
    prefix = choices[0]
    if not any(element in _LIGHTNING for element, _ in children(tree)):
        return prefix, parts[prefix]
    below = prefix + _attribute(prefix, parts[prefix], where)
    return below, [key for key in parts[prefix] if key.startswith(below)]


def without_training_state(tree: Node, keys: Collection[str]) -> set[str]:
    """Return the keys that do not belong to an optimizer or other training state."""
    parts = _parts(tree, set(keys))
    return {key for prefix, below in parts.items() if _head(prefix) not in _TRAINING for key in below}


def is_training_state(key: str) -> bool:
    """Return whether a flat key belongs to an optimizer or other training state."""
    return _head(key) in _TRAINING


def _is_either(tree: Node, names: Sequence[str]) -> bool:
    """Return whether keys that look like training state may belong to the model, or all ``names`` share a prefix."""
    is_flat = any(_head(str(element)) in _OPTIMIZER for element, node in children(tree) if isinstance(node, int))
    return is_flat or all(name.startswith("model.") for name in names)


def _head(key: str) -> str:
    return key.partition(".")[0]


def _parts(tree: Node, keys: Collection[str]) -> dict[str, list[str]]:
    """Group the keys by prefix: the name of their top-level container, or "" for top-level keys.

    A flat top-level key of an optimizer, such as "optimizer.state.w", counts as nested.
    """
    parts: dict[str, list[str]] = {}
    for element, node in children(tree):
        below = [key for path, _ in leaves(node, (element,)) if (key := join(path)) in keys]
        if not isinstance(node, int | Wrapper):
            prefix = f"{element}."
        else:
            prefix = _first(str(element)) if _head(str(element)) in _OPTIMIZER else ""
        if below:
            parts.setdefault(prefix, []).extend(below)
    return parts


def _first(key: str) -> str:
    """Return the first part of a flat key with its dot, or the whole key if it has no dot."""
    head, dot, _ = key.partition(".")
    return head + dot


def _attribute(prefix: str, keys: Sequence[str], where: str) -> str:
    """Return the name, with a dot, of the attribute of a Lightning module that holds the model."""
    names = sorted({_first(key.removeprefix(prefix)) for key in keys})
    if len(names) > 1 or not names[0].endswith("."):
        raise _unclear(where, [prefix + name for name in names])
    return names[0]


def _unclear(where: str, choices: Sequence[str]) -> InvalidInput:
    named = [choice for choice in dict.fromkeys(choices) if choice.endswith(".")]
    more = ", ..." if len(named) > _MOST else ""
    ways = " or ".join(f"--strip-prefix {choice}" for choice in named[:_MOST])
    return InvalidInput(
        f"several parts of {where} may be the model. Choose one with {ways}{more}; or select tensors with --keys, "
        "and pass "
        "--strip-prefix '' to keep their full names"
    )


def plain_names(names: Sequence[str]) -> list[str]:
    """Return ``names`` without the parts that DDP, FSDP, activation checkpointing and torch.compile add."""
    plain = [".".join(part for part in name.split(".") if part not in _INNER) for name in names]
    while plain and all(name.startswith(f"{_DDP}.") for name in plain):
        plain = [name.removeprefix(f"{_DDP}.") for name in plain]
    return plain


def check_no_adapters(names: Sequence[str], prefix: str) -> None:
    """Raise InvalidInput for the names of a model with adapters, because few model classes can load them."""
    for name in names:
        if not set(_ADAPTERS).isdisjoint(name.split(".")):
            raise InvalidInput(
                f"{name!r} belongs to an adapter, or to a layer inside an adapter. A model that is created from its "
                "config.json rarely has such a name. Merge the adapter (merge_and_unload) before the save, or export "
                "all tensors with --format safetensors; if it is a name of the model itself, pass --strip-prefix "
                f"{prefix}",
                key=name,
            )
