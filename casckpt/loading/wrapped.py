"""Loads wrappers (see `casckpt.tensors.kinds`): compares those of a template with those of a checkpoint.

A template's wrapper must be equal to the stored one, except for the values of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from casckpt.contents.contents import Contents
from casckpt.errors import Mismatch
from casckpt.format.forms import differences
from casckpt.format.tree import Element, Wrapper, kind_of
from casckpt.tensors.dtypes import dtype_name
from casckpt.tensors.shards import local_tensor
from casckpt.tensors.state import LeafValue

_SHOWN = 3


def has_wrapper(contents: Contents, key: str, name: str, here: Wrapper, inner: Sequence[tuple[LeafValue, str]]) -> bool:
    """Return whether the checkpoint has all of the wrapper ``name``. Raises Mismatch if it does not fit the template.

    ``here``: the template's node at ``key``. ``inner``: the template's inner tensors, each with its saved key.
    """
    there = contents.wrappers.get(name)
    if there is None:
        if name in contents.tensors or name in contents.objects:
            kind = "a plain tensor" if name in contents.tensors else "plain data"
            raise Mismatch(
                f"{key!r} is a wrapper of other tensors here, but {kind} in {contents.where} (key {name!r}); "
                f"ignore_mismatched= leaves it unchanged",
                key=key,
            )
        return False
    differ = list(islice(_differ(here, there, inner, contents), _SHOWN))
    if differ:
        raise Mismatch(
            f"{key!r} does not fit {contents.where} (key {name!r}): {'; '.join(differ)}. Create it as it was created "
            f"for the save; ignore_mismatched= leaves it unchanged",
            key=key,
        )
    return not any(contents.manifest.lacks(contents.tensor(saved)) for _, saved in inner)


def _differ(here: Wrapper, there: Wrapper, inner: Sequence[tuple[LeafValue, str]], contents: Contents) -> Iterator[str]:
    if here.in_parts and not there.in_parts:
        yield "it was saved whole and cannot be cut, and is sharded here"
    elif there.in_parts and (not here.in_parts or any(_moved(here, there, name) for name in here.nodes)):
        yield f"it was saved in {len(there.nodes)} parts that cannot be cut, and has a different sharding here"
    else:
        yield from forms_differ(here, there)
        for leaf, saved in inner:
            entry, local = contents.tensors.get(saved), local_tensor(leaf.key, leaf.value)
            own = (dtype_name(local.dtype), local.shape)
            if entry is not None and own != (entry.dtype, entry.shape):
                saved_as = f"{entry.dtype} of shape {list(entry.shape)}"
                yield f"{leaf.path[-1]!r} is {own[0]} of shape {list(own[1])} here, but {saved_as}"


def _moved(here: Wrapper, there: Wrapper, name: Element) -> bool:
    """Return whether the checkpoint lacks a part with the same elements as the one here."""
    own, saved = here.nodes[name], there.nodes.get(name)
    if isinstance(own, Wrapper) and isinstance(saved, Wrapper):
        return bool(own.fields.get("regions") != saved.fields.get("regions"))
    return saved is None


def forms_differ(here: Wrapper, there: Wrapper) -> Iterator[str]:
    """Yield the differences between two wrappers, except those of their tensors."""
    if here.form != there.form:
        kinds = list(differences(here.fields.get("kind"), there.fields.get("kind"), "kind"))
        yield from kinds or differences(here.fields, there.fields)
    if not here.in_parts and here.nodes.keys() != there.nodes.keys():
        yield f"it consists of {', '.join(map(str, here.nodes))} here, but {', '.join(map(str, there.nodes))}"
    for name in here.nodes.keys() & there.nodes.keys():
        own, saved = here.nodes[name], there.nodes[name]
        if isinstance(own, Wrapper) and isinstance(saved, Wrapper):
            yield from forms_differ(own, saved)
        elif kind_of(own) != kind_of(saved):
            yield f"{name!r} is a {kind_of(own)} here, but a {kind_of(saved)}"
