"""A view of a checkpoint: the tensors that a program sees, and their names. A view does not read any data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.sections.index import TENSOR
from casckpt.frontends.views.model_part import check_no_adapters, model_part, plain_names
from casckpt.frontends.views.recut import Split, ViewTensor, recut
from casckpt.loading.options import Rename, check_used, renamer, usable_patterns


@dataclass(frozen=True)
class Rules:
    """The rules of a view. ``keys``: fnmatch patterns for the keys of the checkpoint; None for all.

    ``strip_prefix``: show only the tensors below this prefix, and remove it from their names; "" for all. ``model``:
    show only the weights of the model, under their names in the unwrapped model. In that case, ``strip_prefix`` is the
    prefix of the model, and None means that the view finds it. ``rename``: maps the resulting names to new names, as
    in `casckpt.Store.load`, but starts from the checkpoint's names. ``split``: the tensors to split, by their
    new names. ``dtype``: show the tensors that `casckpt.loading.regions.is_castable` names in this dtype.
    """

    keys: Sequence[str] | None = None
    strip_prefix: str | None = None
    rename: Rename = None
    model: bool = False
    split: Split = field(default_factory=dict)
    dtype: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the view shows everything unchanged."""
        return replace(self, keys=self.keys or None) == Rules()


@dataclass(frozen=True)
class View:
    """A view: ``tensors`` by name, ``left_out`` (hidden keys that match), and the ``prefix`` of all shown keys."""

    tensors: tuple[ViewTensor, ...]
    left_out: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def nbytes(self) -> int:
        """The total bytes of all tensors."""
        return sum(tensor.entry.nbytes for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        """The total bytes of their sources, which differ if they have another dtype."""
        return sum(source.nbytes for tensor in self.tensors for source in tensor.sources)


def view_of(contents: Contents, rules: Rules) -> View:
    """Return the view of a checkpoint under the given rules. It does not depend on the ranks that saved the state.

    Raises MissingKey if a pattern or prefix matches nothing, and Damaged for an incomplete tensor. Raises InvalidInput
    if two tensors would have the same name, if several parts may be the model, or if its weights consist of others.
    """
    patterns, matches = usable_patterns(rules.keys) or None, contents.manifest.matches
    asked = {key: entry for key, entry in contents.tensors.items() if matches(key, patterns)}
    check_used(patterns, [*contents.tensors, *contents.wrappers], contents.where)
    prefix, keys = _part(contents, list(asked), rules)
    names = _names(keys, prefix, rules)
    if rules.model:
        _check_no_wrappers(contents, keys)
    tensors = [ViewTensor(name, asked[key]) for key, name in zip(keys, names, strict=True)]
    contents.check_whole([tensor.entry for tensor in tensors])
    if rules.split:
        tensors = recut(tensors, rules.split)
        _check_names((tensor.name, tensor.entry.key) for tensor in tensors)
    seen = {source.entry.number for tensor in tensors for source in tensor.sources}
    objects = [key for key in contents.objects if matches(key, patterns)]
    others = [entry.key if entry.rank is None else f"{entry.key} (of rank {entry.rank})"
              for entry in contents.manifest.entries
              if entry.kind == TENSOR and entry.number not in seen and matches(entry.key, patterns)]  # fmt: skip
    shown = sorted((tensor.cast(rules.dtype) for tensor in tensors), key=lambda tensor: tensor.name)
    return View(tuple(shown), (*objects, *others), prefix)


def _part(contents: Contents, keys: Sequence[str], rules: Rules) -> tuple[str, Sequence[str]]:
    """Return the prefix and the keys below it."""
    if rules.strip_prefix is None:
        return model_part(contents.tree, keys, contents.where) if rules.model else ("", keys)
    prefix = rules.strip_prefix and f"{rules.strip_prefix.removesuffix('.')}."
    below = [key for key in keys if key.startswith(prefix)]
    if not below:
        raise MissingKey(
            f"{contents.where} has no tensors below {prefix!r}; `casckpt show --tensors` lists its tensors",
            keys=(prefix,),
        )
    return prefix, below


def _names(keys: Sequence[str], prefix: str, rules: Rules) -> list[str]:
    names = [key.removeprefix(prefix) for key in keys]
    if rules.model:
        names = plain_names(names)
    rename: Callable[[str], str] = renamer(rules.rename)
    names = [rename(name) for name in names]
    if rules.model and rules.strip_prefix is None and prefix:  # the prefix was found, but the user has not confirmed it
        check_no_adapters(names, prefix)
    _check_names(zip(names, keys, strict=True))
    return names


def _check_no_wrappers(contents: Contents, keys: Sequence[str]) -> None:
    for key in keys:
        if key in contents.outer:
            raise InvalidInput(
                f"{contents.outer[key]!r} consists of other tensors, so from_pretrained could not load it from such a "
                "file. Load the checkpoint into a model with such weights, and call its save_pretrained",
                key=contents.outer[key],
            )


def _check_names(named: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidInput for empty names and names that occur twice. ``named``: names and keys of tensors."""
    key_of: dict[str, str] = {}
    for name, key in named:
        if not name:
            raise InvalidInput(f"the name of {key!r} would be empty; strip a shorter prefix", key=key)
        if name in key_of:
            raise InvalidInput(f"{key_of[name]!r} and {key!r} would both be named {name!r}; rename one", key=key)
        key_of[name] = key
