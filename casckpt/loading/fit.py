"""How the names of a model's tensors fit those of a checkpoint: what a load fills, and which names miss each other.

Functions of names and shapes, which every front end that fills tensors by name calls before the first byte changes.
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

_CONTAINERS = frozenset(("model", "module", "state_dict", "model_state_dict", "base_model"))
"""What names begin with, where a model lies in a container or in a wrapper."""
_WRAPPERS = frozenset((
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "original_module",
    "modules_to_save",
))  # fmt: skip
_REPLACED = frozenset(("base_layer", "original_module", "modules_to_save"))  # of these, what PEFT adds
_SHARE = 10
"""A load raises if more than one in so many of its tensors stand in the checkpoint under another name."""
_SHOWN = 3
_LOGGED: set[tuple[str, str, int]] = set()


@dataclass(frozen=True)
class Fit:
    """The tensors of a template, by key, against a checkpoint.

    ``filled``: the key of the checkpoint that each of them is filled from. Tensors that share their memory with one of
    these count as filled. ``unfilled``: those that stay as they are. ``misfits``: those for which the checkpoint has
    another shape, over which the load raises.
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
        """How many tensors there are."""
        return len(self.filled) + len(self.unfilled) + len(self.misfits)


def merged(fits: Sequence[Fit]) -> Fit:
    """The fit of all ranks: what any of them fills is filled."""
    filled = {key: name for fit in fits for key, name in fit.filled.items()}
    unfilled = {key: shape for fit in fits for key, shape in fit.unfilled.items() if key not in filled}
    return Fit(filled, unfilled, frozenset[str]().union(*(fit.misfits for fit in fits)))


def check_fit(fit: Fit, saved: Shapes, where: str, rename: Rename = None, way: str = "give") -> str | None:
    """Say what stays unfilled, for the log; None if nothing does. ``saved``: the tensors that could have been read.

    ``way``: how a caller takes a ``rename``.

    Raises MissingKey if nothing would be filled, or if more than a tenth of the tensors stand in the checkpoint under
    another name; Mismatch for a checkpoint with adapters, for which the model has no place.
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
    """Say of a checkpoint that it lacks some keys, and has others with another shape or dtype."""
    lacking, other = ([key for key in unfilled if (key in saved) is there] for there in (False, True))
    said = [f"lacks {listed(lacking, _SHOWN)}"] if lacking else []
    return " and ".join([*said, *([f"has {listed(other, _SHOWN)} with another shape or dtype"] if other else [])])


def check_no_adapters(names: Sequence[str], where: str) -> None:
    """Raise Mismatch for the adapters ``names`` of a checkpoint, where the model has none."""
    if names:
        raise Mismatch(
            f"{where} has the adapter tensors {listed(names, _SHOWN)}, and this model has no adapters. Put adapters "
            "into it first (peft.get_peft_model, PeftModel), or save the model after merge_and_unload(); "
            'unread="ignore" leaves them out',
            keys=tuple(names),
        )


def log_once(checkpoint: str, said: str | None, keys: Collection[str], level: int = logging.WARNING) -> None:
    """Log ``said``, if there is something, once for each ``checkpoint`` (an id) and model, known by some ``keys``."""
    if said is not None and (told := (checkpoint, said, hash(tuple(keys)))) not in _LOGGED:
        _LOGGED.add(told)
        log.log(level, "%s", said)


# names


def is_adapter(name: str) -> bool:
    """Tell whether a name is of an adapter's tensor, as PEFT calls them."""
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def name_without_adapters(name: str) -> str:
    """The name that a tensor of a model with adapters had before PEFT put them in."""
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(_without(parts, _REPLACED))


def plain(name: str) -> str:
    """``name`` without what containers, wrappers and adapters add to it."""
    parts = name.split(".")
    kept = [part for at, part in enumerate(parts) if not (at and _names_adapter(parts, at, "lora_"))]
    kept = _without(kept, _WRAPPERS)
    while len(kept) > 1 and kept[0] in _CONTAINERS:
        kept.pop(0)
    return ".".join(kept)


def _names_adapter(parts: Sequence[str], at: int, start: str) -> bool:
    """Whether a part is what the user calls an adapter: PEFT puts it between two of its own."""
    return parts[at - 1].startswith(start) and at < len(parts) - 1


def _without(parts: Sequence[str], dropped: frozenset[str]) -> list[str]:
    """The parts that are not ``dropped``. The last one stays, and the name of an adapter goes along."""
    return [
        part
        for at, part in enumerate(parts)
        if at == len(parts) - 1 or not (part in dropped or (at and _names_adapter(parts, at, "modules_to_save")))
    ]


def missed_pairs(unfilled: Shapes, unread: Shapes) -> dict[str, str]:
    """Unfilled keys, each with a key of equal shape that is not read, where one name ends with the other at a dot.

    Names are compared as `plain` gives them. Each key is in one pair at most.
    """
    pairs = _ending(unfilled, unread)
    taken = set(pairs.values())
    left = {key: shape for key, shape in unfilled.items() if key not in pairs}
    others = {name: unread[name] for name in sorted(unread) if name not in taken}  # equal models do not mix
    return pairs | {key: name for name, key in _ending(others, left).items()}


def _ending(longer: Shapes, shorter: Shapes) -> dict[str, str]:
    """Keys of ``longer`` whose names end with that of a key of ``shorter``, each with that key, by the longest end."""
    by_name = grouped(shorter, lambda key: (plain(key), tuple(shorter[key])))
    found: dict[str, str] = {}
    for key, shape in longer.items():
        end = plain(key)
        while end and not by_name.get((end, tuple(shape))):
            end = end.partition(".")[2]
        if end:
            there = by_name[end, tuple(shape)]
            found[key] = max(there, key=partial(_common_parts, key))
            there.remove(found[key])
    return found


def _common_parts(one: str, other: str) -> int:
    """How many parts at their ends two names have in common."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# the rename that would load missed pairs


def rename_hint(pairs: Mapping[str, str], filled: Mapping[str, str], rename: Rename = None, way: str = "give") -> str:
    """Say which ``rename`` fills ``pairs``; nothing if there are none."""
    if not pairs:
        return ""
    while isinstance(rename, Renaming):
        rename = rename.given
    rules, more = rename_for(pairs, filled), " for these, beside what your own function does"
    if rename is None or isinstance(rename, Mapping):
        rules, more = rules | {old: new for old, new in (rename or {}).items() if old not in rules}, ""
    return f"{len(pairs)} of them have other names there: {way} rename={rules!r}{more}"


def rename_for(pairs: Mapping[str, str], filled: Mapping[str, str]) -> dict[str, str]:
    """Regular expressions of keys, and replacements, that give each key of ``pairs`` its partner.

    A rule exchanges what names begin with, and keeps the numbers there. A rule that would change what ``filled`` has
    is left out. Keys that no rule serves stand there by themselves.
    """
    found = sorted(dict.fromkeys(_rule(*pair) for pair in pairs.items()), key=lambda rule: -rule[0].count(r"\."))
    rules = {pattern: new for pattern, new in dict(found).items() if _spares(pattern, new, filled)}
    apply = renamer(rules)
    alone = {re.escape(key): name.replace("\\", r"\\") for key, name in pairs.items() if apply(key) != name}
    return alone | rules


def _spares(pattern: str, new: str, filled: Mapping[str, str]) -> bool:
    """Whether a rule leaves the names in ``filled`` as they are."""
    hits = ((found, name) for key, name in filled.items() if (found := re.fullmatch(pattern, key)))
    return all(found.expand(new) == name for found, name in hits)


def _rule(key: str, name: str) -> tuple[str, str]:
    """One rule: what stands before the longest common end of both is exchanged."""
    same = _common_parts(key, name)
    head, new = key.split(".")[: -same or None], name.split(".")[: -same or None]
    keeps = [part for part in head if part.isdecimal()] == [part for part in new if part.isdecimal()]
    groups = count(1)
    pattern = "".join((r"(\d+)" if keeps and part.isdecimal() else re.escape(part)) + r"\." for part in head)
    parts = (rf"\{next(groups)}" if keeps and part.isdecimal() else part.replace("\\", r"\\") for part in new)
    replacement = "".join(f"{part}." for part in parts)
    return f"{pattern}(.*)", rf"{replacement}\{next(groups)}"


# what a template and a checkpoint hold


def saved_shapes(manifest: Manifest) -> dict[str, Shape]:
    """The shapes of the tensors of a checkpoint, but for those that it leaves out since it was thinned."""
    return {key: entry.shape for key, entry in manifest.tensors.items() if not manifest.lacks(entry)}


def shape_of(value: Any) -> Shape | None:
    """The global shape of a tensor, a shard, or a list of shards; None for what has none."""
    one = value[0] if isinstance(value, list) and value else value
    shape = getattr(one, "global_shape", getattr(one, "shape", None))
    return None if shape is None else tuple(shape)


def memory_of(value: Any) -> tuple[int, int]:
    """What tells the memory that a tensor or shard has on this rank from others; where it has none, what tells it."""
    tensor = value.data if isinstance(value, Shard) else value
    try:
        local = local_of(tensor)
        at, numel = local.data_ptr(), local.numel()
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        return 0, id(value)
    return (at, numel) if at and numel else (0, id(value))


def chosen(where: str, nested: Fit, bare: Fit) -> bool:
    """Tell which reading of a checkpoint fills more: True if the names of the model stand at its top (``bare``).

    ``nested``: below "model". Raises InvalidInput if both fill as many, from different keys.
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
