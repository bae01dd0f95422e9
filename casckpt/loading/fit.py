"""Compares the names of a model's tensors with those of a checkpoint, and finds which tensors a load fills.

Front ends that fill tensors by name call these functions before they change anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Any, TypeAlias

from casckpt.base.groups import grouped
from casckpt.base.text import listed
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Shape
from casckpt.loading.arguments import Rename, Renaming, renamer
from casckpt.tensors.dtensors import local_of
from casckpt.tensors.values import Shard

log = logging.getLogger("casckpt")

Shapes: TypeAlias = Mapping[str, Shape]
"""Global shapes, by key."""

PACKED = ".quant_state.bitsandbytes__"
"""Part of the keys of values that a Linear4bit of bitsandbytes creates again for each state_dict."""
_CONTAINERS = frozenset(("model", "module", "state_dict", "model_state_dict", "base_model"))
"""The first parts of model names in a container or wrapper."""
_WRAPPERS = frozenset((
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "original_module",
    "modules_to_save",
))  # fmt: skip
_REPLACED = frozenset(("base_layer", "original_module", "modules_to_save"))  # the names that PEFT adds
_SHARE = 10
"""The share of tensors with other names in the checkpoint above which a load raises."""
_SHOWN = 3
_LOGGED: set[tuple[str, str, int]] = set()


@dataclass(frozen=True)
class Fit:
    """The tensors of a template that a checkpoint fills, by key.

    ``filled``: the key in the checkpoint for each filled tensor, which includes tensors that share memory with one.
    ``unfilled``: tensors that stay as they are. ``misfits``: tensors with another shape in the checkpoint, for
    which the load raises.
    """

    filled: Mapping[str, str] = field(default_factory=dict)
    unfilled: Shapes = field(default_factory=dict)
    misfits: frozenset[str] = frozenset()

    @property
    def is_full(self) -> bool:
        """Whether all tensors are filled."""
        return not self.unfilled and not self.misfits

    @property
    def count(self) -> int:
        """The number of tensors."""
        return len(self.filled) + len(self.unfilled) + len(self.misfits)


def merged(fits: Sequence[Fit]) -> Fit:
    """Return the fit of all ranks: a tensor is filled if any rank fills it."""
    filled = {key: name for fit in fits for key, name in fit.filled.items()}
    unfilled = {key: shape for fit in fits for key, shape in fit.unfilled.items() if key not in filled}
    return Fit(filled, unfilled, frozenset[str]().union(*(fit.misfits for fit in fits)))


def check_fit(fit: Fit, saved: Shapes, where: str, rename: Rename = None, way: str = "give") -> str | None:
    """Return a log message about the tensors that stay unfilled; None if there are none.

    ``saved``: the tensors to read from. ``way``: how the caller passes a ``rename``. Raises MissingKey if nothing
    would be filled, or if more than a tenth of the tensors have other names in the checkpoint; Mismatch for
    adapters in a checkpoint if the model has none.
    """
    if not fit.unfilled:
        return None
    read = set(fit.filled.values())
    unread = {name: shape for name, shape in saved.items() if name not in read}
    if not any(map(is_adapter, (*fit.filled, *fit.unfilled))):
        check_no_adapters([name for name in unread if is_adapter(name)], where)
    pairs = missed_pairs(fit.unfilled, unread)
    filled = f"{len(fit.filled)} of {fit.count} tensors from {where}"
    lacking, there = listed(list(fit.unfilled), _SHOWN), listed(list(unread), _SHOWN)
    lost = _why_unfilled(fit.unfilled, saved)
    hint = rename_hint(pairs, fit.filled, rename, way)
    if len(pairs) * _SHARE > fit.count or not (fit.filled or fit.misfits):
        raise MissingKey(
            f"this load would fill {filled}: it {lost}, and has {there or 'no others'}. "
            f'{hint or f"Choose another checkpoint, or {way} rename="}; unread="ignore" leaves them as they are',
            keys=tuple(fit.unfilled),
        )
    return f"filled {filled}; left unchanged: {lacking}." + (f" {hint}" if hint else "")


def _why_unfilled(unfilled: Shapes, saved: Shapes) -> str:
    """Describe which keys a checkpoint lacks, and which have another shape or dtype."""
    lacking, other = ([key for key in unfilled if (key in saved) is there] for there in (False, True))
    said = [f"lacks {listed(lacking, _SHOWN)}"] if lacking else []
    return " and ".join([*said, *([f"has {listed(other, _SHOWN)} with another shape or dtype"] if other else [])])


def check_no_adapters(names: Sequence[str], where: str) -> None:
    """Raise Mismatch for the adapter tensors ``names`` of a checkpoint. Call it if the model has no adapters."""
    if names:
        raise Mismatch(
            f"{where} has the adapter tensors {listed(names, _SHOWN)}, and this model has no adapters. Put adapters "
            "into it first (peft.get_peft_model, PeftModel), or save the model after merge_and_unload(); "
            'unread="ignore" leaves them out',
            keys=tuple(names),
        )


def log_once(checkpoint: str, said: str | None, keys: Collection[str], level: int = logging.WARNING) -> None:
    """Log the message ``said``, if any, once for each ``checkpoint`` (an id) and model, identified by some ``keys``."""
    if said is not None and (told := (checkpoint, said, hash(tuple(keys)))) not in _LOGGED:
        _LOGGED.add(told)
        log.log(level, "%s", said)


# names


def is_adapter(name: str) -> bool:
    """Return whether a name is that of a tensor of a PEFT adapter."""
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def name_without_adapters(name: str) -> str:
    """Return the name of a tensor before PEFT added adapters to the model."""
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(_without(parts, _REPLACED))


def plain(name: str) -> str:
    """Return ``name`` without the parts that containers, wrappers and adapters add."""
    parts = name.split(".")
    kept = [part for at, part in enumerate(parts) if not (at and _names_adapter(parts, at, "lora_"))]
    kept = _without(kept, _WRAPPERS)
    while len(kept) > 1 and kept[0] in _CONTAINERS:
        kept.pop(0)
    return ".".join(kept)


def _names_adapter(parts: Sequence[str], at: int, start: str) -> bool:
    """Return whether a part is the user's name of an adapter, which PEFT puts after a part of its own."""
    return parts[at - 1].startswith(start) and at < len(parts) - 1


def _without(parts: Sequence[str], dropped: frozenset[str]) -> list[str]:
    """Return the parts that are not ``dropped``. Keeps the last one. Drops the name of an adapter too."""
    return [
        part
        for at, part in enumerate(parts)
        if at == len(parts) - 1 or not (part in dropped or (at and _names_adapter(parts, at, "modules_to_save")))
    ]


def missed_pairs(unfilled: Shapes, unread: Shapes) -> dict[str, str]:
    """Return pairs of an unfilled key and an unread key of the same shape, if one name ends with the other at a dot.

    Names are compared without the parts that `plain` removes. Each key is in at most one pair.
    """
    pairs = _ending(unfilled, unread)
    taken = set(pairs.values())
    left = {key: shape for key, shape in unfilled.items() if key not in pairs}
    others = {name: unread[name] for name in sorted(unread) if name not in taken}  # this keeps equal models apart
    return pairs | {key: name for name, key in _ending(others, left).items()}


def _ending(longer: Shapes, shorter: Shapes) -> dict[str, str]:
    """Return pairs of a key of ``longer`` and the key of ``shorter`` with which its name ends, by the longest end."""
    by_name = grouped(shorter, lambda key: (plain(key), tuple(shorter[key])))
    pairs: dict[str, str] = {}
    for key, shape in longer.items():
        end = plain(key)
        while end and not by_name.get((end, tuple(shape))):
            end = end.partition(".")[2]
        if end:
            candidates = by_name[end, tuple(shape)]
            pairs[key] = max(candidates, key=partial(_common_parts, key))
            candidates.remove(pairs[key])
    return pairs


def _common_parts(one: str, other: str) -> int:
    """Return the number of equal parts at the ends of two names."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# the rename that would load missed pairs


def rename_hint(pairs: Mapping[str, str], filled: Mapping[str, str], rename: Rename = None, way: str = "give") -> str:
    """Describe the ``rename`` that fills ``pairs``; "" if there are none."""
    if not pairs:
        return ""
    while isinstance(rename, Renaming):
        rename = rename.given
    rules, more = rename_for(pairs, filled), " for these, beside what your own function does"
    if rename is None or isinstance(rename, Mapping):
        rules, more = rules | {old: new for old, new in (rename or {}).items() if old not in rules}, ""
    return f"{len(pairs)} of them have other names there: {way} rename={rules!r}{more}"


def rename_for(pairs: Mapping[str, str], filled: Mapping[str, str]) -> dict[str, str]:
    """Return regular expressions and replacements that map each key of ``pairs`` to its partner.

    A rule replaces the start of names, and keeps numbers in it. Rules that would change names in ``filled`` are
    left out. Keys without a rule are mapped one by one.
    """
    found = sorted(dict.fromkeys(_rule(*pair) for pair in pairs.items()), key=lambda rule: -rule[0].count(r"\."))
    rules = {pattern: new for pattern, new in dict(found).items() if _spares(pattern, new, filled)}
    apply = renamer(rules)
    alone = {re.escape(key): name.replace("\\", r"\\") for key, name in pairs.items() if apply(key) != name}
    return alone | rules


def _spares(pattern: str, new: str, filled: Mapping[str, str]) -> bool:
    """Return whether a rule leaves the names in ``filled`` unchanged."""
    matches = ((match, name) for key, name in filled.items() if (match := re.fullmatch(pattern, key)))
    return all(match.expand(new) == name for match, name in matches)


def _rule(key: str, name: str) -> tuple[str, str]:
    """Return the rule that replaces the part before the longest common end of two names."""
    same = _common_parts(key, name)
    head, new = key.split(".")[: -same or None], name.split(".")[: -same or None]
    keeps = [part for part in head if part.isdecimal()] == [part for part in new if part.isdecimal()]
    groups = count(1)
    pattern = "".join((r"(\d+)" if keeps and part.isdecimal() else re.escape(part)) + r"\." for part in head)
    parts = (rf"\{next(groups)}" if keeps and part.isdecimal() else part.replace("\\", r"\\") for part in new)
    replacement = "".join(f"{part}." for part in parts)
    return f"{pattern}(.*)", rf"{replacement}\{next(groups)}"


# contents of templates and checkpoints


def saved_shapes(manifest: Manifest) -> dict[str, Shape]:
    """Return the shapes of the tensors of a checkpoint, without thinned ones."""
    return {key: entry.shape for key, entry in manifest.tensors.items() if not manifest.lacks(entry)}


def shape_of(value: Any) -> Shape | None:
    """Return the global shape of a tensor, a shard, or a list of shards; None for other values."""
    one = value[0] if isinstance(value, list) and value else value
    shape = getattr(one, "global_shape", getattr(one, "shape", None))
    return None if shape is None else tuple(shape)


def memory_of(value: Any) -> tuple[int, int]:
    """Return a key for the memory of a tensor or shard on this rank; without memory, a key for the value."""
    tensor = value.data if isinstance(value, Shard) else value
    try:
        local = local_of(tensor)
        at, numel = local.data_ptr(), local.numel()
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        return 0, id(value)
    return (at, numel) if at and numel else (0, id(value))


def chosen(where: str, nested: Fit, bare: Fit) -> bool:
    """Return whether the names at the top of a checkpoint (``bare``) fill more than those below "model" (``nested``).

    Raises InvalidInput if both fill equally many, from different keys.
    """
    if len(nested.filled) == len(bare.filled) and nested.filled != bare.filled:
        key = next(key for key, name in nested.filled.items() if bare.filled.get(key) != name)
        raise InvalidInput(
            f"{where} has the names of this model twice: {nested.filled[key]!r}, and the same at its top. For those at "
            'the top give rename={"model\\\\.(.*)": r"\\1"}; for those below "model" load by '
            'store.load({"model": model.state_dict()}, ref)',
            key=key,
        )
    return (len(bare.filled), len(bare.misfits)) > (len(nested.filled), len(nested.misfits))
