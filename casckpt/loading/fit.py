"""Compares the tensor names of a model with those of a checkpoint, and determines which tensors a load fills.

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
from casckpt.base.text import is_news, listed
from casckpt.errors import InvalidInput, Mismatch, MissingKey
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Shape
from casckpt.loading.options import Rename, Renaming, renamer
from casckpt.tensors.dtensors import local_of
from casckpt.tensors.values import Shard

log = logging.getLogger("casckpt")

Shapes: TypeAlias = Mapping[str, Shape]
"""Global shapes, by key."""

PACKED = ".quant_state.bitsandbytes__"
"""Part of the key of each value that a Linear4bit of bitsandbytes recreates for every state_dict."""
_CONTAINERS = frozenset(("model", "module", "state_dict", "model_state_dict", "base_model"))
"""The parts with which a model's names begin if it is in a container or wrapper."""
_WRAPPERS = frozenset((
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "original_module",
    "modules_to_save",
))  # fmt: skip
_REPLACED = frozenset(("base_layer", "original_module", "modules_to_save"))  # the names that PEFT adds
_AVERAGE = re.compile(r"(?:^|[._])(?:ema|swa|averaged?|shadow)(?:[._]|$)")
_SHARE = 10
"""A load raises an error if more than 1/10 of the tensors have different names in the checkpoint."""
_SHOWN = 3


@dataclass(frozen=True)
class Fit:
    """The template tensors that a checkpoint fills, by key.

    ``filled``: the checkpoint key of each filled tensor. Tensors that share memory with a filled tensor count as
    filled. ``unfilled``: the tensors that remain unchanged. ``misfits``: the tensors with a different shape in the
    checkpoint, for which the load raises an error, and those that their modules convert.
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
    """Return the combined fit of all ranks. A tensor is filled if any rank fills it."""
    filled = {key: name for fit in fits for key, name in fit.filled.items()}
    unfilled = {key: shape for fit in fits for key, shape in fit.unfilled.items() if key not in filled}
    return Fit(filled, unfilled, frozenset[str]().union(*(fit.misfits for fit in fits)))


def check_fit(fit: Fit, saved: Shapes, where: str, rename: Rename = None, way: str = "give") -> str | None:
    """Return a log message about the tensors that remain unfilled, or None if there are none.

    ``saved``: the tensors of the checkpoint. ``way``: how the caller passes a ``rename``. Raises MissingKey if nothing
    would be filled, or if more than a tenth of the tensors have different names in the checkpoint. Raises Mismatch if
    the checkpoint has adapters and the model does not.
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
            f"this load would fill {filled}: the checkpoint {lost}, and has {there or 'no other tensors'}. "
            f'{hint or f"Choose a different checkpoint, or {way} rename="}; unread="ignore" leaves them unchanged',
            keys=tuple(fit.unfilled),
        )
    return f"filled {filled}; left unchanged: {lacking}." + (f" {hint}" if hint else "")


def _why_unfilled(unfilled: Shapes, saved: Shapes) -> str:
    """Describe which keys a checkpoint lacks, and which have a different shape or dtype."""
    lacking, other = ([key for key in unfilled if (key in saved) is there] for there in (False, True))
    said = [f"lacks {listed(lacking, _SHOWN)}"] if lacking else []
    return " and ".join([*said, *([f"has {listed(other, _SHOWN)} with a different shape or dtype"] if other else [])])


def check_no_adapters(names: Sequence[str], where: str) -> None:
    """Raise Mismatch for the adapter tensors ``names`` of a checkpoint.

    Call this if the model does not have adapters.
    """
    if names:
        raise Mismatch(
            f"{where} has the adapter tensors {listed(names, _SHOWN)}, but this model has no adapters. Add adapters "
            "to it first (peft.get_peft_model, PeftModel), or save the model after merge_and_unload(); "
            'unread="ignore" leaves them out',
            keys=tuple(names),
        )


def log_once(checkpoint: str, said: str | None, keys: Collection[str], level: int = logging.WARNING) -> None:
    """Log the message ``said`` unless it is None, once per checkpoint and model.

    ``keys``: some keys that identify the model.
    """
    if said is not None and is_news(checkpoint, said, hash(tuple(keys))):
        log.log(level, "%s", said)


# names


def is_adapter(name: str) -> bool:
    """Return whether a tensor name belongs to a PEFT adapter."""
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def name_without_adapters(name: str) -> str:
    """Return the name that a tensor had before PEFT added adapters to the model."""
    return ".".join(_without(name.removeprefix("base_model.model.").split("."), _REPLACED))


def plain(name: str) -> str:
    """Return ``name`` without the parts that containers, wrappers and adapters add to it."""
    parts = name.split(".")
    kept = [part for at, part in enumerate(parts) if not (at and _names_adapter(parts, at, "lora_"))]
    kept = _without(kept, _WRAPPERS)
    while len(kept) > 1 and kept[0] in _CONTAINERS:
        kept.pop(0)
    return ".".join(kept)


def _names_adapter(parts: Sequence[str], at: int, start: str) -> bool:
    """Return whether a part is the user's name for an adapter. PEFT inserts this name after one of its own parts."""
    return parts[at - 1].startswith(start) and at < len(parts) - 1


def _without(parts: Sequence[str], dropped: frozenset[str]) -> list[str]:
    """Return the parts that are not in ``dropped``. Always keeps the last part. Also drops adapter names."""
    return [
        part
        for at, part in enumerate(parts)
        if at == len(parts) - 1 or not (part in dropped or (at and _names_adapter(parts, at, "modules_to_save")))
    ]


def missed_pairs(unfilled: Shapes, unread: Shapes) -> dict[str, str]:
    """Pair unfilled keys with unread keys of the same shape if one name ends with the other, at a dot.

    Names are compared without the parts that `plain` removes. Each key is in at most one pair.
    """
    pairs = _ending(unfilled, unread)
    taken = set(pairs.values())
    left = {key: shape for key, shape in unfilled.items() if key not in pairs}
    # sorted, which keeps equal models apart
    others = {name: unread[name] for name in sorted(unread) if name not in taken}
    return pairs | {key: name for name, key in _ending(others, left).items()}


def _ending(longer: Shapes, shorter: Shapes) -> dict[str, str]:
    """Pair each key of ``longer`` with the longest key of ``shorter`` with which its name ends.

    Pairs averages only with averages, because otherwise the raw weights would load as the average.
    """
    by_name = grouped(shorter, lambda key: (plain(key), tuple(shorter[key]), bool(_AVERAGE.search(key))))
    pairs: dict[str, str] = {}
    for key, shape in longer.items():
        end, kind = plain(key), (tuple(shape), bool(_AVERAGE.search(key)))
        while end and not by_name.get((end, *kind)):
            end = end.partition(".")[2]
        if end:
            candidates = by_name[end, *kind]
            pairs[key] = max(candidates, key=partial(_common_parts, key))
            candidates.remove(pairs[key])
    return pairs


def _common_parts(one: str, other: str) -> int:
    """Return the number of parts that are equal at the ends of two names."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# the rename that would load the missed pairs


def rename_hint(pairs: Mapping[str, str], filled: Mapping[str, str], rename: Rename = None, way: str = "give") -> str:
    """Describe the ``rename`` that fills ``pairs``. Return "" if there are no pairs."""
    if not pairs:
        return ""
    while isinstance(rename, Renaming):
        rename = rename.given
    rules, more = rename_for(pairs, filled), " for these, in addition to what your own function does"
    if rename is None or isinstance(rename, Mapping):
        rules, more = rules | {old: new for old, new in (rename or {}).items() if old not in rules}, ""
    return f"{len(pairs)} of them have different names there: {way} rename={rules!r}{more}"


def rename_for(pairs: Mapping[str, str], filled: Mapping[str, str]) -> dict[str, str]:
    """Return regular expressions and replacements that map each key of ``pairs`` to its partner.

    A rule replaces the start of a name, but keeps the numbers in it. Rules that would change names in ``filled`` are
    omitted. Keys without a rule are mapped one by one.
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
    """Return the rule that replaces everything before the longest common suffix of two names."""
    same = _common_parts(key, name)
    head, new = key.split(".")[: -same or None], name.split(".")[: -same or None]
    keeps = [part for part in head if part.isdecimal()] == [part for part in new if part.isdecimal()]
    groups = count(1)
    pattern = "".join((r"(\d+)" if keeps and part.isdecimal() else re.escape(part)) + r"\." for part in head)
    parts = (rf"\{next(groups)}" if keeps and part.isdecimal() else part.replace("\\", r"\\") for part in new)
    replacement = "".join(f"{part}." for part in parts)
    return f"{pattern}(.*)", rf"{replacement}\{next(groups)}"


# the contents of templates and checkpoints


def saved_shapes(manifest: Manifest) -> dict[str, Shape]:
    """Return the shapes of a checkpoint's tensors, except for thinned tensors."""
    return {key: entry.shape for key, entry in manifest.tensors.items() if not manifest.lacks(entry)}


def shape_of(value: Any) -> Shape | None:
    """Return the global shape of a tensor, a shard, or a list of shards. Return None for other values."""
    one = value[0] if isinstance(value, list) and value else value
    shape = getattr(one, "global_shape", getattr(one, "shape", None))
    return None if shape is None else tuple(shape)


def memory_of(value: Any) -> tuple[int, int]:
    """Return a key for the memory of a tensor or shard on this rank.

    If the value does not have memory, return a key for the value itself.
    """
    tensor = value.data if isinstance(value, Shard) else value
    try:
        local = local_of(tensor)
        at, numel = local.data_ptr(), local.numel()
    except (AttributeError, RuntimeError):  # not a tensor, or a tensor without memory of its own
        return 0, id(value)
    return (at, numel) if at and numel else (0, id(value))


def chosen(where: str, nested: Fit, bare: Fit) -> bool:
    """Return whether a checkpoint's top-level names (``bare``) fill more than its names below "model" (``nested``).

    Raises InvalidInput if both fill the same number of tensors, but from different keys.
    """
    if len(nested.filled) == len(bare.filled) and nested.filled != bare.filled:
        key = next(key for key, name in nested.filled.items() if bare.filled.get(key) != name)
        raise InvalidInput(
            f"{where} has the names of this model twice: {nested.filled[key]!r}, and the same name at the top level. "
            'To load those at the top, pass rename={"model\\\\.(.*)": r"\\1"}; to load those below "model", call '
            'store.load({"model": model.state_dict()}, ref)',
            key=key,
        )
    return (len(bare.filled), len(bare.misfits)) > (len(nested.filled), len(nested.misfits))
