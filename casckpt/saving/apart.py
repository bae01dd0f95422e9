"""Stores sharded tensors in parts if ranks hold them in different forms.

A rank may hold its part of a tensor as a wrapper of other tensors, while a different rank holds a plain tensor, because
its part is too small. No rank can know this alone, so the leader finds these tensors, and all ranks store their parts
of them separately. This works on staged copies, so it is also possible in the background.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from casckpt.format.forms import encode_form
from casckpt.format.records import changed
from casckpt.format.regions import normalise
from casckpt.format.sections.index import TENSOR
from casckpt.format.tree import TENSOR as TENSOR_LEAF
from casckpt.format.tree import Element, Node, Wrapper, children, container, join, kind_of, may_wrap, units
from casckpt.saving.local_entries import LocalEntry
from casckpt.saving.prepare import Prepared
from casckpt.tensors.shards import Piece, local_tensor
from casckpt.tensors.state import decode_tree, encode_tree
from casckpt.tensors.wrappers import part_name, parts_form


def held_apart(trees: Iterable[bytes]) -> frozenset[str]:
    """Return the keys of wrappers that have a different form or are plain on a different rank."""
    encoded = set(trees)
    if len(encoded) < 2 or not any(map(may_wrap, encoded)):
        return frozenset()
    forms: dict[str, set[str]] = {}
    wrapped = set[str]()
    for tree in encoded:
        for path, node in units(decode_tree(tree)):
            key = join(path)
            forms.setdefault(key, set()).add(node.form if isinstance(node, Wrapper) else kind_of(node))
            wrapped |= {key} if isinstance(node, Wrapper) else set()
    return frozenset(key for key in wrapped if len(forms[key]) > 1)


def apart(prepared: Prepared, keys: Collection[str]) -> Prepared:
    """Return the same state with these tensors in parts. This rank need not have all of these keys."""
    flats = {key: prepared.in_parts[key] for key in keys if key in prepared.in_parts}
    nodes = {key: flat.wrappers[key] for key, flat in flats.items()}
    # an inner tensor of a part has the part's name between the wrapper's key and its own name
    parts = [(key, leaf) for key, flat in flats.items() for leaf in flat.leaves.values()]
    old = {leaf.key: join((key, *leaf.path[2:])) for key, leaf in parts}
    inner, held, sources = set(old.values()), dict[str, LocalEntry](), list[LocalEntry]()
    for source in prepared.sources:
        if source.kind == TENSOR and source.key in inner:
            held[source.key] = source
        elif source.kind == TENSOR and source.key in keys and source.replicated:
            found = {part_name(normalise(piece.region, source.shape), source.shape): piece for piece in source.pieces}
            form = encode_form(parts_form(source.dtype, source.shape))
            nodes[source.key] = Wrapper(form, dict.fromkeys(found, TENSOR_LEAF))
            sources += [_part(source, f"{source.key}.{name}", piece, piece.data.shape) for name, piece in found.items()]
        else:
            sources.append(source)
    for _, leaf in parts:
        source, shape = held[old[leaf.key]], local_tensor(leaf.key, leaf.value).shape
        sources.append(_part(source, leaf.key, source.pieces[0], shape))
    tree = encode_tree(_replaced(decode_tree(prepared.tree), "", nodes)) if nodes else prepared.tree
    return replace(prepared, sources=sources, tree=tree)


def _part(source: LocalEntry, key: str, piece: Piece, shape: Iterable[int]) -> LocalEntry:
    own = tuple(shape)
    return changed(source, key=key, shape=own, data=piece.data.reshape(own), shards=(), replicated=True)


def _replaced(node: Node, key: str, nodes: Mapping[str, Wrapper]) -> Node:
    """Return a tree with these nodes, by flat key."""
    if key in nodes:
        return nodes[key]
    if isinstance(node, int | Wrapper):
        return node
    below: dict[Element, Node] = {
        element: _replaced(child, f"{key}.{element}" if key else str(element), nodes)
        for element, child in children(node)
    }
    made: Node = container(type(node), below, node)
    return made
