"""How the names of a model's tensors fit those of a checkpoint: what a load fills, and which names miss each other.

Functions of names and shapes, which every front end that fills tensors by name calls before the first byte changes.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from casckpt.checkpoint.arguments import Rename, renamer
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Shape
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
    filled, lacking = f"{len(fit.filled)} of {fit.count} tensors from {where}", _listed(list(fit.unfilled))
    hint = rename_hint(pairs, fit.filled, rename, way)
    if len(pairs) * _SHARE > fit.count or not (fit.filled or fit.misfits):
        raise MissingKey(
            f"this load would fill {filled}: it lacks {lacking}, and has {_listed(list(unread)) or 'no others'}. "
            f'{hint or f"Choose another checkpoint, or {way} rename="}; unread="ignore" leaves them as they are',
            keys=tuple(fit.unfilled),
        )
    return f"filled {filled}; {lacking} stay as they are." + (f" {hint}" if hint else "")


def check_no_adapters(names: Sequence[str], where: str) -> None:
    """Raise Mismatch for the adapters ``names`` of a checkpoint, where the model has none."""
    if names:
        raise Mismatch(
            f"{where} has the adapter tensors {_listed(names)}, and this model has no adapters. Put adapters into it "
            "first (peft.get_peft_model, PeftModel), or save the model after merge_and_unload(); "
            'unread="ignore" leaves them out',
            keys=tuple(names),
        )


def warn_partly(checkpoint: str, said: str | None, keys: Sequence[str]) -> None:
    """Log what `check_fit` says, once of each ``checkpoint`` (an id) and model, told by the ``keys`` that it left."""
    if said is not None and (told := (checkpoint, said, hash(tuple(keys)))) not in _LOGGED:
        _LOGGED.add(told)
        log.warning("%s", said)


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
    pairs: dict[str, str] = {}
    waiting = _by_name(unread)
    left = {key: shape for key, shape in unfilled.items() if not _take(pairs, key, plain(key), shape, waiting)}
    reverse, taken = dict[str, str](), set(pairs.values())
    waiting = _by_name(left)
    for name, shape in unread.items():
        if name not in taken:
            _take(reverse, name, plain(name), shape, waiting)
    return pairs | {key: name for name, key in reverse.items()}


def _by_name(shapes: Shapes) -> dict[tuple[str, Shape], list[str]]:
    """Keys by what `missed_pairs` compares; the first one is last, to be taken first."""
    found = defaultdict[tuple[str, Shape], list[str]](list)
    for key in reversed(list(shapes)):
        found[plain(key), tuple(shapes[key])].append(key)
    return found


def _take(
    pairs: dict[str, str], key: str, name: str, shape: Shape, waiting: Mapping[tuple[str, Shape], list[str]]
) -> bool:
    for end in _ends(name):
        if waiting.get((end, tuple(shape))):
            pairs[key] = waiting[end, tuple(shape)].pop()
            return True
    return False


def _ends(name: str) -> Iterator[str]:
    """A name, and what it ends with at each dot; the longest first."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


# the rename that would load missed pairs


def rename_hint(pairs: Mapping[str, str], filled: Mapping[str, str], rename: Rename = None, way: str = "give") -> str:
    """Say which ``rename`` fills ``pairs``; nothing if there are none."""
    if not pairs:
        return ""
    rules = rename_for(pairs, filled)
    more = f"Under other names it has {len(pairs)} of them; {way} rename="
    if rename is None or isinstance(rename, Mapping):
        return f"{more}{rules | {old: new for old, new in (rename or {}).items() if old not in rules}!r}"
    return f"{more}{rules!r} for these, beside what your own function does"


def rename_for(pairs: Mapping[str, str], filled: Mapping[str, str]) -> dict[str, str]:
    """Regular expressions of keys, and replacements, that give each key of ``pairs`` its partner.

    A rule exchanges what names begin with, and keeps the numbers there. Where rules would be wrong, or change what
    ``filled`` has, single keys take their place.
    """
    found = {rule: rule[0].count(r"\.") for rule in dict.fromkeys(_rule(*pair) for pair in pairs.items())}
    rules = dict(sorted(found, key=lambda rule: -found[rule]))
    apply = renamer(rules)
    wrong = [key for key, name in pairs.items() if apply(key) != name]
    if wrong or any(apply(key) not in (key, name) for key, name in filled.items()):
        hit = {pattern for pattern in rules if any(re.fullmatch(pattern, key) for key in filled)}
        rules = {pattern: new for pattern, new in rules.items() if pattern not in hit}
        apply = renamer(rules)
        alone = [key for key, name in pairs.items() if apply(key) != name]
        return {re.escape(key): pairs[key].replace("\\", r"\\") for key in alone} | rules
    return rules


def _rule(key: str, name: str) -> tuple[str, str]:
    """One rule: what stands before the longest common end of both is exchanged."""
    mine, its = key.split("."), name.split(".")
    same = 0
    while same < min(len(mine), len(its)) and mine[-same - 1] == its[-same - 1]:
        same += 1
    head, new = mine[: len(mine) - same], its[: len(its) - same]
    numbers = [part for part in head if part.isdecimal()]
    if numbers != [part for part in new if part.isdecimal()]:
        numbers = []
    pattern = "".join((r"(\d+)" if numbers and part.isdecimal() else re.escape(part)) + r"\." for part in head)
    replacement, at = "", 0
    for part in new:
        at += (is_number := bool(numbers) and part.isdecimal())
        replacement += (rf"\{at}" if is_number else part.replace("\\", r"\\")) + "."
    return f"{pattern}(.*)", rf"{replacement}\{len(numbers) + 1}"


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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


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
