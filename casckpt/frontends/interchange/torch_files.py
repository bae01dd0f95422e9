"""Imports and exports torch.save files without holding a whole state in memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import pickle
import re
import struct
import tarfile
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
from torch.serialization import MAGIC_NUMBER, skip_data

from casckpt.base.names import check_keywords
from casckpt.base.progress import Progress, Shown
from casckpt.base.text import is_url, listed, local_path
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, Mismatch, NotFound, Refused
from casckpt.format.plain_codecs import Unfit
from casckpt.format.sections.index import Entry
from casckpt.format.tree import TENSOR, Element, Leaf, Node, children, container, find, join, leaves
from casckpt.frontends.interchange import plain_pickles
from casckpt.frontends.interchange.new_files import file_attachments, new_file, place_for, torch_saves
from casckpt.frontends.interchange.optimizer_names import by_name, is_named, is_optimizer_state
from casckpt.frontends.interchange.resident import letting_go
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.views.recut import ViewTensor
from casckpt.frontends.views.view import Rules, View, view_of
from casckpt.loading.load import values_at
from casckpt.loading.options import LoadOptions
from casckpt.loading.regions import RegionReader
from casckpt.saving.options import UnpicklingArguments
from casckpt.store.exports import Exported, FileOptions
from casckpt.store.store import Store
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.objects import TORCH_EXTENSIONS, is_archive, read_archive, refused_name, write_archive
from casckpt.tensors.state import inflate
from casckpt.tensors.untrusted import misread
from casckpt.tensors.values import OfObjects

log = logging.getLogger(__name__)

_WHOLE = Rules()

_Storage: TypeAlias = ViewTensor | bytes
"""The content of a storage in a file: a tensor in the checkpoint, or the data of a tensor inside an object."""
_DEFINE = (
    "Each class must have its original module and name. Import the file where it has, or write torch.save({'model': "
    "module.state_dict()}, path) there. For a class of __main__, import it in a program, set it with `import __main__; "
    "__main__.NAME = NAME`, and call torch_save_to_casckpt of casckpt.frontends.convert there, with allow_pickle=True"
)
_WITH_NAMES = (
    "Import again with parameter_names= (--parameter-names FILE, which this writes: pathlib.Path(FILE).write_text("
    "json.dumps([name for group in optimizer.param_groups for p in group['params'] for name, q in "
    "model.named_parameters() if q is p]))), or load"
)
_MAGIC = (MAGIC_NUMBER.to_bytes(10, "little"), str(MAGIC_NUMBER).encode())  # begins files from torch before 1.6
_SHARD = re.compile(r".+-[0-9]+-of-[0-9]+\.bin")
# an entry in a zip file's directory: the crc, and the lengths of its fields
_CENTRAL = struct.Struct("<4s12xL8xHHH12x")


def torch_save_to_casckpt(
    path: str | os.PathLike[str],
    store: AnyStore,
    *,
    step: int,
    as_is: bool = False,
    parameter_names: Sequence[str] | None = None,
    **options: Unpack[UnpicklingArguments],
) -> Checkpoint:
    """Save the contents of a torch.save file that holds a mapping of names to tensors and plain data.

    The file is memory-mapped.

    A model is saved under ``model``, and its optimizer under ``optim``, by parameter name.
    `load_model_and_optim_state` and `Checkpointer.resume` find them there. The rest becomes rank 0's train state.
    Parts that do not match this layout are saved unchanged, and both the result's ``notes`` and the log name them.
    ``as_is``: save the whole state unchanged. ``parameter_names``: the names of the optimizer's parameters in order,
    such as ``[name for name, parameter in model.named_parameters() if parameter.requires_grad]``, if the shapes do not
    determine the names. Raises Mismatch if the names do not fit.

    torch's restricted unpickler reads the file. ``allow_pickle``: use the full unpickler, which runs code from the
    file. Raises NotFound, InvalidInput or Refused for a file that cannot be imported, and the errors of `Store.save`.
    """
    check_keywords("torch_save_to_casckpt", options, UnpicklingArguments)
    given = local_path(path)
    if _SHARD.fullmatch(given.name) and any(given.parent.glob("*.bin.index.json")):
        raise InvalidInput(f"{given} is one of several files of a model; pass the folder {given.parent}")
    state = _read(given, options.get("allow_pickle", False))
    if not isinstance(state, Mapping):
        raise InvalidInput(f"{given} holds a {type(state).__name__}; only mappings of names to values can be imported")
    arranged = TorchState(state) if as_is else laid_out(state, parameter_names)
    for note in arranged.notes:
        log.warning("%s: %s", given, note)
    options["progress"] = letting_go(options.get("progress"), _unmapper(given))
    saved = as_store(store).save(OfObjects(arranged.state), step=step, no_dist=True, **options)
    return replace(saved, notes=arranged.notes)


def mapped_weights(path: Path) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Return the tensors of a file that holds only a model's weights, and a function that releases its mapped pages.

    Raises InvalidInput for any other content, and Refused for a damaged file.
    """
    invalid = InvalidInput(f"{path} is damaged, or holds more than a model's weights; import the file itself")
    try:
        state = _read(path, allow_pickle=False)
    except InvalidInput as error:
        raise invalid from error
    if not isinstance(state, dict) or not all(isinstance(key, str) and _is_dense(state[key]) for key in state):
        raise invalid
    return state, _unmapper(path)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _read(path: Path, allow_pickle: bool) -> Any:
    if not path.is_file():
        raise NotFound(f"there is no file {path}; pass the path of a file that torch.save wrote")
    with misread(lambda why: Refused(f"{path} is not a torch.save file, or is damaged: {why}")):
        with path.open("rb") as file:
            start = file.read(32)
        mapped = is_archive(start[:4])  # files from torch versions before 1.6 cannot be mapped
        if not mapped and not any(magic in start for magic in _MAGIC) and not tarfile.is_tarfile(path):
            raise Refused(
                f"{path} is {'a plain pickle, ' * (start[:1] == pickle.PROTO)}not a torch.save file. A plain pickle "
                "runs code. If you trust it, read it with pickle.load, make tensors of its arrays, and use Store.save"
            )
        try:
            state = plain_pickles.load(path, mapped=mapped, allow_pickle=allow_pickle)
        except (pickle.UnpicklingError, Unfit) as error:
            if allow_pickle:
                raise
            held = refused_name(error)
            raise InvalidInput(
                f"{path} holds more than tensors and plain data ({held}), so reading it runs code from the file; "
                "pass allow_pickle=True (--allow-pickle) if you trust its source. Modules then become their state_dict"
                + f". {_DEFINE}"
                * ("__main__." in held)
            ) from error
        except RuntimeError as error:
            if "TorchScript" not in str(error):
                raise
            raise InvalidInput(
                f"{path} is a TorchScript archive. Save its weights with torch.save(torch.jit.load({str(path)!r})"
                ".state_dict(), file), and import that file"
            ) from error
        except (AttributeError, ImportError) as error:
            if not allow_pickle:
                raise
            raise InvalidInput(f"{path} holds objects of an unknown class: {error}. {_DEFINE}") from error
        return plain_pickles.plain(state)


def _unmapper(path: Path) -> Callable[[], None]:
    """Return a function that releases the pages of a file that torch has mapped."""
    spans, advise = list(_spans(path)), ctypes.CDLL(None, use_errno=True).madvise

    def let_go() -> None:
        for start, length in spans:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)

    return let_go


def _spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the (address, length) of each mapping of a file in this process, if the kernel lists them."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if name == str(path.resolve()):
            start, _, end = place.partition("-")
            yield int(start, 16), int(end, 16) - int(start, 16)


# export


def casckpt_to_torch_save(
    store: AnyStore, ref: str | Checkpoint, path: str | os.PathLike[str], **options: Unpack[FileOptions]
) -> Checkpoint:
    """Write a checkpoint with its original nesting to one file for `torch.load`; see `export_torch`.

    The log names skipped values.
    """
    done = export_torch(store, ref, path, **options)
    if done.left_out:
        names = ", ".join(done.left_out)
        log.warning(
            "skipped, because plain torch.load cannot read it (pass allow_pickle=True to include it): %s", names
        )
    return done.checkpoint


def export_torch(
    store: AnyStore,
    ref: str | Checkpoint,
    path: str | os.PathLike[str],
    rules: Rules = _WHOLE,
    *,
    force: bool = False,
    allow_pickle: bool = False,
    progress: Shown | None = None,
) -> Exported:
    """Write a checkpoint as one file that plain `torch.load` can read. The export holds 64 MiB in memory at a time.

    The file holds the whole checkpoint with its original nesting. With ``rules`` other than the dtype (see
    `casckpt.frontends.views.view`) it holds a dict of tensors by name. The export skips values that torch's restricted
    unpickler cannot read, such as numpy arrays. A list or tuple that loses items becomes a dict with the indices as
    keys. ``allow_pickle``: do not skip values. Pickles are unpickled and repickled, and loading the file requires
    ``torch.load(..., weights_only=False)``.

    Every byte that is read is verified. ``path``: a file, or a URL to which a temporary file is copied. ``force``:
    overwrite an existing file.

    Raises NotFound, MissingKey, Conflict if ``path`` exists, InvalidInput, Damaged or StorageError. After an error, no
    file exists under the final name.
    """
    opened = as_store(store)
    checkpoint = opened.get(ref)
    job = _Export(opened, checkpoint, allow_pickle)
    is_whole = replace(rules, dtype=None).is_plain
    state, view, storages = job.whole(rules.dtype) if is_whole else job.seen(rules)
    with place_for(path, force=force) as place, new_file(place, force=force) as target:
        manifest = job.contents.manifest
        reader = RegionReader(opened.repository, manifest, view.bytes_read, Progress(progress), dtype=rules.dtype)
        job.write(target, state, storages, reader)
        name = os.fspath(path) if is_url(path) else place
    skipped = tuple(file_attachments(opened, checkpoint))
    return Exported(
        checkpoint, (name,), len(view.tensors), view.nbytes, (), view.left_out, skipped, "torch", view.prefix,
    )  # fmt: skip


class _Export:
    """An export. torch writes the file without tensor data, and the export then fills in the data."""

    def __init__(self, store: Store, checkpoint: Checkpoint, allow_pickle: bool) -> None:
        self.contents = Contents.open(store.repository, checkpoint.commit, extensions=TORCH_EXTENSIONS)
        self._options = LoadOptions(allow_pickle=allow_pickle)
        self._repo = store.repository
        self._fake = FakeTensorMode()

    def whole(self, dtype: str | None) -> tuple[Any, View, Sequence[_Storage]]:
        """Return the whole nested checkpoint, with tensors that lack their data, and its storages in order."""
        self.contents.check_no_wrappers("a file of torch.save")
        tree = self.contents.whole_tree()
        keys = [join(path) for path, node in leaves(tree) if node == TENSOR]
        self.contents.check_whole([self.contents.tensor(key) for key in keys])
        objects = values_at(self._repo, self.contents, list(self.contents.objects), self._options)
        left_out = () if self._options.allow_pickle else tuple(key for key in objects if not _is_read(objects[key]))
        tree = tree if self._options.allow_pickle else _of_plain_kinds(tree)
        tensors: list[ViewTensor] = []
        storages: list[_Storage] = []

        def leaf(key: str, node: Leaf) -> Any:
            if node != TENSOR:
                storages.extend(_storages_in(objects[key]) if self.contents.objects[key].pickled else ())
                return objects[key]
            tensors.append(ViewTensor(key, self.contents.tensor(key)).cast(dtype))
            storages.append(tensors[-1])
            return self._empty(tensors[-1].entry)

        state = inflate(tree, leaf, lambda key: key not in left_out)
        return state, View(tuple(tensors), left_out), storages

    def seen(self, rules: Rules) -> tuple[Any, View, Sequence[_Storage]]:
        """Return the tensors of a view by name, without data, and their storages in order."""
        view, metadata = view_of(self.contents, rules), None
        state = OrderedDict((tensor.name, self._empty(tensor.entry)) for tensor in view.tensors)
        if rules.strip_prefix and not (rules.keys or rules.rename):
            metadata = getattr(find(self.contents.tree, rules.strip_prefix.removesuffix(".")), "_metadata", None)
        if metadata is not None and _is_read(metadata):
            vars(state)["_metadata"] = metadata  # the versions of modules, without which torch would convert values
        return state, view, view.tensors

    def _empty(self, entry: Entry) -> torch.Tensor:
        with self._fake:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")

    def write(self, path: Path, state: Any, storages: Sequence[_Storage], reader: RegionReader) -> None:
        """Write the file. It is durable when the method returns."""
        path.open("xb").close()  # raises a clear error if the folder is not writable
        with skip_data(materialize_fake_tensors=True), torch_saves():
            torch.save(state, path)
        _write_sums(path, _filled(path, storages, reader))
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _storages_in(value: Any) -> Iterator[bytes]:
    """Yield the data of the storages that torch.save finds in an object, in torch.save's order."""
    with zipfile.ZipFile(BytesIO(write_archive(value))) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        for index in count():
            if f"data/{index}" not in names:
                return
            yield archive.read(names[f"data/{index}"])


def _filled(path: Path, storages: Sequence[_Storage], reader: RegionReader) -> dict[str, int]:
    """Write the data of all storages into the file. Return each record's crc."""
    places: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
    sums: dict[str, int] = {}
    with path.open("r+b") as file:
        for index, storage in enumerate(storages):
            record = f"data/{index}"  # torch numbers them in this order
            if sizes.get(record) != (len(storage) if isinstance(storage, bytes) else storage.entry.nbytes):
                raise InvalidInput(f"torch {torch.__version__} numbers storages in an order that casckpt does not know")
            sums[record] = 0
            file.seek(places.get_record_offset(record))
            for data in [storage] if isinstance(storage, bytes) else reader.read_joined(storage.sources):
                file.write(data)
                sums[record] = zlib.crc32(data, sums[record])
    return sums


def _of_plain_kinds(node: Node) -> Node:
    """Return the tree, limited to the containers and ``_metadata`` that torch's restricted unpickler creates."""
    if isinstance(node, int):
        return node
    below: dict[Element, Node] = {element: _of_plain_kinds(child) for element, child in children(node)}
    made: Node = below if isinstance(node, defaultdict) else container(type(node), below, node)
    if isinstance(made, OrderedDict) and not _is_read(vars(made).get("_metadata")):
        del vars(made)["_metadata"]
    return made


def _is_read(value: Any) -> bool:
    """Return whether plain `torch.load` can read a value."""
    if type(value) in (NoneType, bool, float, str) or (type(value) is int and value.bit_length() < 64):
        return True
    data = write_archive(value)
    with zipfile.ZipFile(BytesIO(data)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    try:
        # use only torch's default globals, because another process may not have registered the others
        if get_globals_in_pkl(BytesIO(pickled)) - _get_allowed_globals().keys():
            return False
        read_archive(data)
    except pickle.UnpicklingError:
        return False
    return True


def _write_sums(path: Path, sums: Mapping[str, int]) -> None:
    """Write checksums into a zip file's directory. torch ignores them, but other programs check them."""
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
_ANY_MODEL = re.compile("^(?:(?:model|state_dict)_)+(?=.)|(?:_(?:model|state_dict))+$")
_LIGHTNING = "pytorch-lightning_version"
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class TorchState:
    """A state to save. ``notes``: the parts that do not have the usual layout, with the reasons."""

    state: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def laid_out(state: Mapping[str, Any], parameter_names: Sequence[str] | None = None) -> TorchState:
    """Arrange a state: weights under ``model``, one optimizer by name under ``optim``, and the rest as train state.

    A mapping with all names of the model, such as an average, is a second model: "state_dict_ema" becomes ``ema``. If
    the optimizer's parameters cannot be named, the state remains unchanged, and a note says why. A state without an
    optimizer also remains unchanged. The rest of a Lightning file is placed where `casckpt.frontends.lightning`
    expects it. ``parameter_names``: the names of the optimizer's parameters, in order, if the shapes do not determine
    the names. Raises Mismatch if the names do not fit.
    """
    if is_optimizer_state(state) and not is_named([state]):
        return TorchState(state, (_note("the optimizer", "the file has no model that could provide names"),))
    name = next((name for name in OPTIMIZERS if name in state), "")
    home = next((home for home in MODELS if _is_model(state.get(home))), None)
    optimizers = _optimizers(state.get(name))
    as_it_is = state if home is None or _LIGHTNING not in state else _of_lightning(state, home)
    if not optimizers or is_named(optimizers):
        numbered = [key for key, value in state.items() if is_optimizer_state(value) and not is_named([value])]
        why = f"an optimizer is found under {', '.join(OPTIMIZERS)}"
        return TorchState(as_it_is, tuple(_note(repr(key), why) for key in numbered))
    if home is None:
        return TorchState(state, (_note(repr(name), f"the file has no model's state_dict under {', '.join(MODELS)}"),))
    model = state[home] if _LIGHTNING in state else _unwrapped(state[home])
    try:
        optim = by_name(optimizers, model, parameter_names)
    except Mismatch as error:
        if parameter_names is not None:
            raise
        return TorchState(as_it_is, (_note(repr(name), str(error), _WITH_NAMES),))
    if _LIGHTNING in state:
        return TorchState({**as_it_is, "optim": optim})
    rest = {key: value for key, value in state.items() if key not in (name, home)}
    whole: dict[str, Any] = {"model": model, "optim": optim, "train": {0: rest}}
    models = {key: {str(name).removeprefix("module.") for name in rest[key]} for key in rest if _is_model(rest[key])}
    others = [key for key, names in models.items() if names >= model.keys() and key not in whole]
    for key in others:
        own = _ANY_MODEL.sub("", str(key))
        whole[key if own in {*whole, *state} else own] = _unwrapped(rest.pop(key))
    told = f"the file has other models, {listed(others)}, stored as {listed([*whole][3:])}; the rest is train state"
    return TorchState({key: value for key, value in whole.items() if rest or key != "train"}, (told,) * bool(others))


def _of_lightning(state: Mapping[str, Any], home: str) -> Mapping[str, Any]:
    """Return the layout of `casckpt.frontends.lightning`: the weights, and the whole file with optimizers."""
    return {"model": state[home], "lightning": {key: value for key, value in state.items() if key != home}}


def _note(what: str, why: str, advice: str = "Load") -> str:
    return (
        f"{what} identifies its parameters by number. It is stored unchanged, without their names ({why}), so a "
        f"resume cannot find it. {advice} it with store.read and optim.load_state_dict"
    )


def _optimizers(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return the states of one or several optimizers, or an empty sequence for any other value."""
    states = [value] if is_optimizer_state(value) else value
    states = list(states.values()) if isinstance(states, Mapping) else states
    are_states = isinstance(states, list | tuple) and all(is_optimizer_state(state) for state in states)
    return list(states) if are_states else []


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(tensor, torch.Tensor) for tensor in value.values())


def _unwrapped(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state_dict without the prefixes that DistributedDataParallel and torch.compile add to all names."""
    for prefix in _WRAPPERS * 2:
        if all(str(key).startswith(prefix) for key in model):
            model = {str(key).removeprefix(prefix): value for key, value in model.items()}
    return model
