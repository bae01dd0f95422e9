"""Files of torch.save into a store, and out of it, without a whole state in memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, Unpack

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._weights_only_unpickler import _get_allowed_globals, get_globals_in_pkl
from torch.serialization import skip_data

from casckpt.base.keywords import check_keywords
from casckpt.base.progress import Shown
from casckpt.base.text import is_url, local_path
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.signatures import get_trusted
from casckpt.errors import InvalidInput, Mismatch, NotFound, Refused
from casckpt.format.sections.index import Entry
from casckpt.format.tree import TENSOR, Element, Leaf, Node, children, container, join, leaves
from casckpt.frontends.interchange.new_files import new_file, place_for, torch_saves
from casckpt.frontends.interchange.optimizer_names import by_name, is_named, is_optimizer_state
from casckpt.frontends.interchange.resident import letting_go
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.views.recut import ViewTensor
from casckpt.frontends.views.view import Rules, View, check_whole, view_of
from casckpt.frontends.views.windows import WindowReader
from casckpt.loading.arguments import Rename
from casckpt.loading.contents import Contents
from casckpt.loading.load import values_at
from casckpt.loading.options import LoadOptions
from casckpt.saving.options import ImportArguments
from casckpt.store.exports import Exported, FileOptions
from casckpt.store.store import Store
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.objects import is_archive, read_archive, refused_name, write_archive
from casckpt.tensors.state import OfObjects, inflate
from casckpt.tensors.untrusted import check_expansion, misread

log = logging.getLogger(__name__)

_Storage: TypeAlias = ViewTensor | bytes
"""What fills a hole of a file: a tensor of the checkpoint, or the data of one inside of an object."""
_DEFINE = (
    "Each class must be where it was when the file was saved. For one of __main__, import it in a program, set it with "
    "`import __main__; __main__.NAME = NAME`, and call torch_save_to_casckpt of casckpt.frontends.convert there, with "
    "allow_pickle=True"
)
_CENTRAL = struct.Struct("<4s12xL8xHHH12x")  # a record of a zip's directory: its crc, and lengths of what follows it


def torch_save_to_casckpt(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    step: int,
    allow_pickle: bool = False,
    as_is: bool = False,
    parameter_names: Sequence[str] | None = None,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save what a file of torch.save holds, a mapping of names to tensors and plain data. The file stays mapped.

    A model and its optimizer in it come under ``model`` and, by the names of parameters, ``optim``, so that
    `load_model_and_optim_state` and `Checkpointer.resume` find them; the rest is the train state of rank 0. What could
    not be laid out so is as it was, and stands in ``notes`` of the result and in the log. ``as_is``: leave it all so.
    ``parameter_names``: of the optimizer's parameters in their order, as ``[name for name, one in
    model.named_parameters() if one.requires_grad]``, where the shapes of its state leave it open. Mismatch if they do
    not fit.

    It is read by torch's restricted unpickler; ``allow_pickle``: by the other one, which runs what is in the file.
    Raises NotFound, InvalidInput, Refused for a file of no use, and what `Store.save` raises.
    """
    check_keywords("torch_save_to_casckpt", options, ImportArguments)
    given = local_path(path)
    state = _read(given, allow_pickle)
    if not isinstance(state, Mapping):
        raise InvalidInput(f"{given} holds a {type(state).__name__}; only mappings of names to values can be imported")
    laid = TorchState(state) if as_is else laid_out(state, parameter_names)
    for note in laid.notes:
        log.warning("%s: %s", given, note)
    options["progress"] = letting_go(options.get("progress"), _unmapper(given))
    saved = as_store(store).save(OfObjects(laid.state), step=step, allow_pickle=allow_pickle, no_dist=True, **options)
    return replace(saved, notes=laid.notes)


def _read(path: Path, allow_pickle: bool) -> Any:
    if not path.is_file():
        raise NotFound(f"there is no file {path}; give the path of a file that torch.save wrote")
    with misread(lambda why: Refused(f"{path} is no file that torch.save wrote, or it is damaged: {why}")):
        with path.open("rb") as file:
            mapped = is_archive(file.read(4))  # the form before torch 1.6 cannot be
        try:
            state = torch.load(path, map_location="cpu", mmap=mapped, weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            if allow_pickle:
                raise
            held = refused_name(error)
            raise InvalidInput(
                f"{path} holds more than tensors and plain data, and reading it runs code from it; pass "
                f"allow_pickle=True (--allow-pickle) if you trust whoever wrote it ({held})"
                + f". {_DEFINE}"
                * ("__main__." in held)
            ) from error
        except (AttributeError, ImportError) as error:
            if not allow_pickle:
                raise
            raise InvalidInput(f"{path} holds objects of a class that is not found here: {error}. {_DEFINE}") from error
    check_expansion(state, path.stat().st_size, str(path))
    return state


def _unmapper(path: Path) -> Callable[[], None]:
    """Make what lets the pages of a file go that torch has mapped, and of which it hands out no map."""
    spans, advise = list(_spans(path)), ctypes.CDLL(None, use_errno=True).madvise

    def let_go() -> None:
        for start, length in spans:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)

    return let_go


def _spans(path: Path) -> Iterator[tuple[int, int]]:
    """(address, length) of where this process has mapped a file; none where the kernel does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if name == str(path.resolve()):
            start, _, end = place.partition("-")
            yield int(start, 16), int(end, 16) - int(start, 16)


# out of a store


def casckpt_to_torch_save(
    store: AnyStore, ref: str | Checkpoint, path: str | os.PathLike[str], **options: Unpack[FileOptions]
) -> Checkpoint:
    """Write a checkpoint, nested as it was saved, as one file for `torch.load`; see `export_torch`.

    What is left out is told of in the log.
    """
    done = export_torch(store, ref, path, **options)
    if done.left_out:
        log.warning("left out, for plain torch.load does not read it (allow_pickle=True): %s", ", ".join(done.left_out))
    return done.checkpoint


def export_torch(
    store: AnyStore,
    ref: str | Checkpoint,
    path: str | os.PathLike[str],
    *,
    keys: Sequence[str] | None = None,
    strip_prefix: str | None = None,
    rename: Rename = None,
    force: bool = False,
    allow_pickle: bool = False,
    progress: Shown | None = None,
) -> Exported:
    """Write a checkpoint as one file that plain `torch.load` reads. Memory holds 64 MiB at a time.

    The file holds the whole checkpoint, nested as it was saved. With ``keys``, ``strip_prefix`` or ``rename`` (see
    `casckpt.frontends.views.view`) it holds a dict of tensors by name. Values that torch's restricted unpickler does
    not read, such as numpy arrays, are left out; a list or tuple that loses items becomes a dict by index.
    ``allow_pickle``: nothing is left out, and what only a pickle
    could hold is unpickled, and pickled again; then it takes ``torch.load(..., weights_only=False)``.

    Every byte that is read is verified. ``path``: of a file, or a URL, to which a temporary file is copied. ``force``:
    over what is there.

    Raises NotFound, MissingKey, Conflict if ``path`` is there, InvalidInput, Damaged, StorageError. After an error
    nothing stands under the final name.
    """
    opened = as_store(store)
    checkpoint = opened.get(ref)
    rules = Rules(keys, strip_prefix, rename)
    job = _Export(opened, checkpoint, allow_pickle)
    state, view, storages = job.whole() if rules.is_plain else job.seen(rules)
    with place_for(path, force=force) as place, new_file(place, force=force) as target:
        job.write(target, state, storages, WindowReader(opened.repository, job.manifest, view.nbytes, progress))
        name = os.fspath(path) if is_url(path) else place
    return Exported(
        checkpoint, (name,), len(view.tensors), view.nbytes, (), view.left_out, tuple(opened.attachments(checkpoint)),
        "torch", view.prefix,
    )  # fmt: skip


class _Export:
    """One file: torch writes it with holes for the data of tensors, which are filled afterwards."""

    def __init__(self, store: Store, checkpoint: Checkpoint, allow_pickle: bool) -> None:
        self.manifest = get_trusted(store.repository, checkpoint.commit)
        self._contents = Contents(self.manifest, 0)
        self._options = LoadOptions(allow_pickle=allow_pickle)
        self._repo = store.repository
        self._fake = FakeTensorMode()

    def whole(self) -> tuple[Any, View, Sequence[_Storage]]:
        """All of the checkpoint, nested as it was saved, of tensors without data; and what fills it, in its order."""
        tree = self._contents.whole_tree()
        keys = [join(path) for path, node in leaves(tree) if node == TENSOR]
        check_whole(self.manifest, [self._contents.stored_tensor(key) for key in keys])
        objects = values_at(self._repo, self._contents, list(self._contents.objects), self._options)
        left_out = () if self._options.allow_pickle else tuple(key for key in objects if not _is_read(objects[key]))
        tree = tree if self._options.allow_pickle else _of_plain_kinds(tree)
        tensors: list[ViewTensor] = []
        storages: list[_Storage] = []

        def leaf(key: str, node: Leaf) -> Any:
            if node != TENSOR:
                storages.extend(_storages_in(objects[key]) if self._contents.objects[key].pickled else ())
                return objects[key]
            tensors.append(ViewTensor(key, self._contents.stored_tensor(key)))
            storages.append(tensors[-1])
            return self._empty(tensors[-1].entry)

        state = inflate(tree, leaf, lambda key: key not in left_out)
        return state, View(tuple(tensors), left_out), storages

    def seen(self, rules: Rules) -> tuple[Any, View, Sequence[_Storage]]:
        """The same of its tensors by the names of a view."""
        view = view_of(self.manifest, rules)
        return {one.name: self._empty(one.entry) for one in view.tensors}, view, view.tensors

    def _empty(self, entry: Entry) -> torch.Tensor:
        with self._fake:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")

    def write(self, path: Path, state: Any, storages: Sequence[_Storage], reader: WindowReader) -> None:
        """All of it, durable."""
        path.open("xb").close()  # so that Python says what is wrong where nothing may be written
        with skip_data(materialize_fake_tensors=True), torch_saves():
            torch.save(state, path)
        _write_sums(path, _filled(path, storages, reader))
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _storages_in(value: Any) -> Iterator[bytes]:
    """The data of the storages that torch.save finds in a value, in its order: an object may hold tensors, too."""
    with zipfile.ZipFile(BytesIO(write_archive(value))) as archive:
        found = {name.partition("/")[2]: name for name in archive.namelist()}
        for index in count():
            if f"data/{index}" not in found:
                return
            yield archive.read(found[f"data/{index}"])


def _filled(path: Path, storages: Sequence[_Storage], reader: WindowReader) -> dict[str, int]:
    """Write the data of all storages into their holes; the crc of each record."""
    places: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    sums: dict[str, int] = {}
    with path.open("r+b") as file:
        for index, storage in enumerate(storages):
            record = f"data/{index}"  # in this order torch numbers them
            if sizes.get(record) != (len(storage) if isinstance(storage, bytes) else storage.entry.nbytes):
                raise InvalidInput(f"torch {torch.__version__} numbers storages otherwise than is known here")
            sums[record] = 0
            file.seek(places.get_record_offset(record))
            for data in [storage] if isinstance(storage, bytes) else reader.read([storage]):
                file.write(data)
                sums[record] = zlib.crc32(data, sums[record])
    return sums


def _of_plain_kinds(node: Node) -> Node:
    """The same tree, of the kinds of containers, and ``_metadata``, that torch's restricted unpickler makes."""
    if isinstance(node, int):
        return node
    found: dict[Element, Node] = {element: _of_plain_kinds(child) for element, child in children(node)}
    made: Node = found if isinstance(node, defaultdict) else container(type(node), found, node)
    if isinstance(made, OrderedDict) and not _is_read(vars(made).get("_metadata")):
        del vars(made)["_metadata"]
    return made


def _is_read(value: Any) -> bool:
    """Tell whether plain `torch.load` reads a value."""
    if type(value) in (NoneType, bool, float, str) or (type(value) is int and value.bit_length() < 64):
        return True
    data = write_archive(value)
    with zipfile.ZipFile(BytesIO(data)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    try:
        # not what this process has registered besides, or a library that it has imported: others have not
        if get_globals_in_pkl(BytesIO(pickled)) - _get_allowed_globals().keys():
            return False
        read_archive(data)
    except pickle.UnpicklingError:
        return False
    return True


def _write_sums(path: Path, sums: Mapping[str, int]) -> None:
    """Put checksums into the directory of a zip: torch does not look at them, other programs do."""
    with zipfile.ZipFile(path) as archive:
        position, names = archive.start_dir, [info.filename for info in archive.infolist()]
    with path.open("r+b", buffering=0) as file:
        for name in names:
            _, _, *lengths = _CENTRAL.unpack(os.pread(file.fileno(), _CENTRAL.size, position))
            crc = sums.get(name.partition("/")[2])
            if crc is not None:
                os.pwrite(file.fileno(), crc.to_bytes(4, "little"), position + 16)
            position += _CENTRAL.size + sum(lengths)


MODELS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
OPTIMIZERS = (
    "optimizer", "optim", "optimizer_states", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
    "optimizers", "opt",
)  # fmt: skip
_LIGHTNING = "pytorch-lightning_version"
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class TorchState:
    """A state to save. ``notes``: what of it is not in the layout, and why."""

    state: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def laid_out(state: Mapping[str, Any], parameter_names: Sequence[str] | None = None) -> TorchState:
    """Weights under ``model``, optimizers as one under ``optim`` by the names of parameters, the rest as train state.

    Where the optimizer cannot be told by names, all stays as it is, and a note says why. A state without an optimizer
    stays as it is. Of a file of Lightning the rest is where `casckpt.frontends.lightning` looks for it.
    ``parameter_names``: of the optimizer's parameters, in order, where their shapes do not tell. Raises Mismatch if
    these do not fit.
    """
    if is_optimizer_state(state) and not is_named([state]):
        return TorchState(state, (_note("the optimizer", "there is no model beside it that could give names"),))
    name = next((name for name in OPTIMIZERS if name in state), "")
    home = next((home for home in MODELS if _is_model(state.get(home))), None)
    optimizers = _optimizers(state.get(name))
    as_it_is = state if home is None or _LIGHTNING not in state else _of_lightning(state, home)
    if not optimizers or is_named(optimizers):
        return TorchState(as_it_is)
    if home is None:
        return TorchState(state, (_note(repr(name), f"none of {', '.join(MODELS)} is a model's state_dict"),))
    model = state[home] if _LIGHTNING in state else _unwrapped(state[home])
    try:
        optim = by_name(optimizers, model, parameter_names)
    except Mismatch as error:
        if parameter_names is not None:
            raise
        return TorchState(as_it_is, (_note(repr(name), str(error), "Import again with parameter_names=, or load"),))
    if _LIGHTNING in state:
        return TorchState({**as_it_is, "optim": optim})
    rest = {key: value for key, value in state.items() if key not in (name, home)}
    return TorchState({"model": model, "optim": optim} | ({"train": {0: rest}} if rest else {}))


def _of_lightning(state: Mapping[str, Any], home: str) -> Mapping[str, Any]:
    """Where `casckpt.frontends.lightning` looks for it: all of the file, optimizers included, beside the weights."""
    return {"model": state[home], "lightning": {key: value for key, value in state.items() if key != home}}


def _note(what: str, why: str, advice: str = "Load") -> str:
    return (
        f"{what} counts its parameters, and is stored as it is, without their names ({why}): no resume will find "
        f"it. {advice} it with store.read and optim.load_state_dict"
    )


def _optimizers(value: Any) -> Sequence[Mapping[str, Any]]:
    """One, or several, if that is what it is."""
    found = [value] if is_optimizer_state(value) else value
    found = list(found.values()) if isinstance(found, Mapping) else found
    several = isinstance(found, list | tuple) and all(is_optimizer_state(one) for one in found)
    return list(found) if several else []


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values())


def _unwrapped(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state_dict under plain names: without what DistributedDataParallel and torch.compile put before all of them."""
    for prefix in _WRAPPERS * 2:
        if all(str(key).startswith(prefix) for key in model):
            model = {str(key).removeprefix(prefix): value for key, value in model.items()}
    return model
