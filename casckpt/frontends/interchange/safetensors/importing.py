"""Imports safetensors files and Hugging Face folders. Tensors are memory-mapped, and never copied as a whole."""

from __future__ import annotations

import glob
import json
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

import torch

from casckpt.base.names import HUB_FILE, check_keywords, is_attachment_name
from casckpt.base.progress import Shown
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.frontends.interchange.resident import letting_go
from casckpt.frontends.interchange.safetensors.files import (
    SUFFIX,
    Header,
    check_safetensors,
    read_header,
    read_index,
)
from casckpt.frontends.interchange.safetensors.layout import STEM, exported_metadata, index_name, is_index, stem_of
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.saving.options import ImportArguments
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import tensor_over

PLACES: Final = "DCP_SHARDING_INFO"
"""The key in a file's metadata that holds the offsets of its tensors in whole tensors, as JSON."""
WRITERS_OWN: Final = frozenset((PLACES, "DCP_VERSION"))
"""Metadata keys that describe only the file itself. They are not saved with the checkpoint."""

_OF_RANK = re.compile(r"shard-[0-9]{1,9}-model-[0-9]+-of-[0-9]+\.safetensors")
_AN_OFFSET = re.compile(r'"saved_offsets": *\[[^\]]*[1-9]')
_OTHERS = re.compile(r"(?:rank_?|model-rank-)([0-9]{1,9})(?:-part-[0-9]+)?\.safetensors")
"""Names of files with parts but without offsets, from OLMo-core, TensorRT-LLM and vLLM's sharded state."""


def _check_whole(path: Path, places: str = "") -> None:
    """Raise Unsupported for a file with one rank's parts of tensors. ``places``: the offsets in its metadata."""
    if _OF_RANK.fullmatch(path.name) or _AN_OFFSET.search(places):
        raise Unsupported(
            f"{path} holds one rank's parts of tensors. Join all files with consolidate_safetensors_files of torch, "
            "unless the model has scalars, for which it writes 0; or load the folder into the model with torch's "
            "HuggingFaceStorageReader, and save that model"
        )


def _is_of_others(path: Path) -> bool:
    if not _OTHERS.fullmatch(path.name):
        return False
    beside = (other for other in path.parent.glob("*.safetensors") if other != path)
    return (path.parent / "metadata.json").exists() or any(_OTHERS.fullmatch(other.name) for other in beside)


MAX_ATTACHMENT_BYTES: Final = 64 << 20
MAX_ATTACHMENTS_BYTES: Final = 256 << 20
METADATA_KEY: Final = "safetensors"
"""The key in a checkpoint's metadata for the ``__metadata__`` of imported files."""

_WEIGHTS = frozenset((
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".hdf5", ".msgpack", ".onnx", ".gguf",
    ".ggml", ".ot", ".tflite", ".npz", ".pdparams", ".index.json",
))  # fmt: skip

_STEMS: Final = (STEM, "diffusion_pytorch_model", "adapter_model", "pytorch_lora_weights")
"""The stems of the files that libraries load, in their order."""
_TORCH_STEMS: Final = ("pytorch_model", *_STEMS[1:])
_TORCH, _TORCH_INDEX = ".bin", ".bin.index.json"
_OF_TRAINER = re.compile(r"checkpoint-[0-9]+")
_OF_GIT = frozenset((".gitattributes", ".gitignore"))
_MAX_JSON_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """The weights of one model. ``index``: their index, which lists ``keys``. ``component``: the subfolder, or ""."""

    weights: tuple[Path, ...]
    index: Path | None = None
    keys: frozenset[str] = frozenset()
    component: str = ""

    @property
    def stem(self) -> str:
        """See `stem_of`. The stem of the index takes precedence. That of a torch.save file is the one in an export."""
        name = (self.index or self.weights[0]).name
        name = re.sub(rf"^{_TORCH_STEMS[0]}(?=\{_TORCH})", STEM, name)
        stem = stem_of(name.removesuffix(_TORCH_INDEX).removesuffix(_TORCH))
        return stem if is_attachment_name(stem) else STEM


@dataclass(frozen=True)
class ImportSources:
    """The input of an import. ``attachments``: files to attach, by name. ``skipped``: names of skipped files.

    ``models``: the files in ``weights``, by model. A folder has several models if it has components.
    """

    weights: tuple[Path, ...]
    attachments: Mapping[str, Path]
    skipped: tuple[str, ...] = ()
    models: tuple[ModelFiles, ...] = ()

    @property
    def nbytes(self) -> int:
        """The total bytes of the files with weights."""
        return sum(path.stat().st_size for path in self.weights)


def import_safetensors(
    store: AnyStore,
    path: str | os.PathLike[str],
    *,
    step: int,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Save the tensors of a safetensors file, or of a Hugging Face folder, under their own keys.

    The keys of a component's tensors begin with the name of its subfolder. The config, the tokenizer and other small
    files in a folder become attachments. The ``__metadata__`` of the files is stored in the checkpoint's metadata
    under "safetensors". `export_safetensors` restores all of it, but divides the tensors into files of its own.

    Raises NotFound, InvalidInput or Unsupported for files that cannot be imported, and the errors of `Store.save`.
    """
    check_keywords("import_safetensors", options, ImportArguments)
    sources = find_sources(path)
    notes = [f"left out: {name}" for name in sources.skipped]
    if notes:
        is_any = any(name.endswith(SUFFIX) or is_index(name) for name in sources.skipped)
        advice = "; to import one of these models by itself, pass the path of its file or index" if is_any else ""
        log.warning("left out: %s%s", ", ".join(sources.skipped), advice)
    state: dict[str, Any] = {}
    file_metadata: dict[str, str] = {}
    views: dict[str, Any] = {}
    done = options.get("progress")
    for model in sources.models:
        maps = Maps(done)
        done = maps.done
        metadata = maps.add_all(model.weights)
        tensors = maps.state
        if missing := sorted(model.keys - tensors.keys()):
            log.warning("%s names tensors that are not in any file: %s", model.index, _few(missing))
        file_metadata = metadata | file_metadata
        if model.component and (key := next((key for key in state if key.partition(".")[0] == model.component), "")):
            raise InvalidInput(
                f"{key!r:.200} begins with the name of the subfolder {model.component!r} of {path}; import the "
                "subfolder itself",
                key=key,
            )
        state |= {model.component: tensors} if model.component else tensors
        if tensors:
            views |= _view(model, tensors, is_alone=len(sources.models) == 1)
    if "tensor_names" in file_metadata:  # Transformers lists the names of quantized weights
        notes.append(
            "the quantized weights of torchao are imported as their inner tensors, from which an export restores the "
            "files; to load them into a model, call from_pretrained on the folder, and save that model"
        )
        log.warning("%s", notes[-1])
    attachments = {name: file.read_bytes() for name, file in sources.attachments.items()}
    if views and Path(path).expanduser().is_dir():
        attachments[HUB_FILE] = json.dumps({"views": views}).encode()
    options["progress"] = done
    options["metadata"] = {METADATA_KEY: file_metadata} | dict(options.get("metadata") or {})
    saved = as_store(store).save(state, step=step, attachments=attachments, no_dist=True, **options)
    return replace(saved, notes=tuple(notes))


def _view(model: ModelFiles, tensors: Iterable[str], *, is_alone: bool) -> dict[str, Any]:
    """Return the view in which an export finds a model, under the stem of its files. See `casckpt.format.views`.

    ``is_alone``: whether the folder has no other models.
    """
    if model.component:
        return {f"{model.component}/{model.stem}": {"strip_prefix": model.component}}
    if is_alone:
        return {} if model.stem == STEM else {model.stem: {}}
    heads = dict.fromkeys(key.partition(".")[:2] for key in tensors)
    return {model.stem: {"keys": [f"{glob.escape(head)}{dot and '.*'}" for head, dot in heads]}}


def find_sources(path: str | os.PathLike[str]) -> ImportSources:
    """Return the files for an import of ``path``: a safetensors file, an index, or a folder with either.

    Raises NotFound, InvalidInput or Unsupported, naming the actual format.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        models = _models_in(given)
        used = {path for model in models for path in (*model.weights, model.index) if path is not None}
        attachments, skipped = _attachments(given, used)
    else:
        attachments, skipped = {}, []
        models = [_shards(given) if is_index(given.name) and given.is_file() else _alone(given)]
    weights = tuple(path for model in models for path in model.weights)
    return ImportSources(weights, attachments, tuple(skipped), tuple(models))


def _alone(path: Path) -> ModelFiles:
    """Return the model in a single file. Raises InvalidInput if several ranks saved it."""
    check_safetensors(path)
    if _is_of_others(path):
        raise InvalidInput(
            f"{path.name} holds one rank's parts of tensors, but several ranks may have saved the model; pass "
            f"the folder {path.parent} with the files of all ranks"
        )
    return ModelFiles((path,))


def _models_in(folder: Path) -> list[ModelFiles]:
    """Return the model in the folder itself, and those in the subfolders that are its components."""
    components = _components(folder)
    models = [_model_in(folder, is_pipeline=bool(components))]
    for component in components:
        model = _model_in(component)
        models.append(model and replace(model, component=component.name))
    found = [model for model in models if model is not None]
    if not found:
        raise _nothing_in(folder)
    return found


def _components(folder: Path) -> list[Path]:
    """Return the subfolders that hold components of a Diffusers pipeline, Sentence Transformers modules or adapters."""
    index, modules = _json(folder / "model_index.json"), _json(folder / "modules.json")
    named = {*index} if isinstance(index, dict) else set[str]()
    for module in modules if isinstance(modules, list) else ():
        named.add(str(module.get("path")) if isinstance(module, dict) else "")
    subfolders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and "." not in path.name]
    return sorted(path for path in subfolders if path.name in named or _is_adapter(path))


def _is_adapter(subfolder: Path) -> bool:
    """Return whether PEFT saved one of several adapters in a subfolder. Folders of models and trainers do not count."""
    is_named = not (subfolder.parent / "config.json").exists() and not _OF_TRAINER.fullmatch(subfolder.name)
    return is_named and (subfolder / "adapter_config.json").is_file()


def _json(path: Path) -> Any:
    try:
        is_readable = path.is_file() and path.stat().st_size <= _MAX_JSON_BYTES
        return json.loads(path.read_bytes()) if is_readable else None
    except (OSError, ValueError, RecursionError):
        return None


def _model_in(folder: Path, *, is_pipeline: bool = False) -> ModelFiles | None:
    """Return the weights that libraries load from a folder, or None. Other files of weights are left out.

    An index decides which files belong to a model. ``is_pipeline``: ignore files without a name that libraries know.
    """
    indexes = sorted(path for path in folder.glob("*.json") if is_index(path.name))
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    shards = {name for index in indexes for name in read_index(index).values()}
    loose = [file for file in files if file.name not in shards]
    for path in () if indexes else loose:
        _check_whole(path)
    known = [folder / name for stem in _STEMS for name in (index_name(stem), f"{stem}{SUFFIX}")]
    choices = [*indexes, *loose]
    chosen = [path for path in known if path in choices][:1]
    if not chosen and not is_pipeline:
        chosen = [path for path in choices if not path.name.startswith("consolidated")] or choices
    if len(chosen) > 1:
        names = _few([path.name for path in chosen])
        raise InvalidInput(f"{folder} holds several models: {names}; pass the path of one of them")
    if chosen:
        return _shards(chosen[0]) if chosen[0] in indexes else _alone(chosen[0])
    for path in (folder / f"{stem}{suffix}" for stem in _TORCH_STEMS for suffix in (_TORCH_INDEX, _TORCH)):
        if path.is_file():
            return ModelFiles((path,)) if path.suffix == _TORCH else _shards(path)
    return None


def _shards(index: Path) -> ModelFiles:
    is_torch = index.name.endswith(_TORCH_INDEX)
    file_of = read_index(index, _TORCH if is_torch else SUFFIX)
    paths = [index.parent / name for name in sorted(set(file_of.values()))]
    for path in paths:
        if not path.is_file():
            raise NotFound(f"{index} names {path.name}, which does not exist; get a complete copy of the folder")
        if not is_torch:
            check_safetensors(path)
    return ModelFiles(tuple(paths), index, frozenset(file_of))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


_AS_FILES = "pass --format files (store.import_files) to store any folder as it is"


def _nothing_in(folder: Path) -> Exception:
    names = {path.name for path in folder.iterdir()}
    if "casckpt.json" in names:
        return Unsupported(f"{folder} is a casckpt store; pass a safetensors file, or a folder with such files")
    kinds = {
        ".metadata": "a torch.distributed.checkpoint checkpoint; `casckpt import` reads it directly",
        "zero_to_fp32.py": "a DeepSpeed checkpoint; convert it with this script, and import the result",
        "metadata.json": "a checkpoint from a different trainer; save its state with store.save",
    }
    for name, what in kinds.items():
        if name in names:
            return Unsupported(f"{folder} does not hold safetensors files, but {what}; {_AS_FILES}")
    deeper = sorted({path.parent.name for kind in (*kinds, "*.safetensors") for path in folder.glob(f"*/{kind}")})
    deeper += sorted(name for name in names if name.endswith((".pt", ".pth", ".ckpt")))
    if deeper:
        return InvalidInput(
            f"{folder} is not a checkpoint itself, but contains several: {_few(deeper)}; choose one of them, "
            f"or {_AS_FILES}"
        )
    return NotFound(
        f"there is no safetensors file in {folder}; pass the path of such a file, or of a folder with such files; "
        f"{_AS_FILES}"
    )


class Maps:
    """Memory-mapped files. ``state``: their tensors. ``done``: the progress to pass to the save; see `letting_go`."""

    def __init__(self, shown: Shown | None) -> None:
        self.state: dict[str, Any] = {}
        self._let_go: list[Callable[[], object]] = []
        self.done = letting_go(shown, self._release)

    def add_all(self, weights: Sequence[Path]) -> dict[str, str]:
        """Map the tensors of all files in order, and return the files' metadata."""
        metadata: dict[str, str] = {}
        for path in weights:
            if path.suffix == _TORCH:
                from casckpt.frontends.interchange.torch_files import mapped_weights  # takes a while to import

                held, let_go = mapped_weights(path)
                self._let_go.append(let_go)
                self._add(path, held.items())
                metadata = exported_metadata({}, is_model=True) | metadata
            else:
                header = read_header(path)
                _check_whole(path, header.metadata.get(PLACES, ""))
                self._add(path, self.mapped(path, header))
                metadata = dict(header.metadata) | metadata
        return {name: text for name, text in metadata.items() if name not in WRITERS_OWN}

    def _release(self) -> None:
        for let_go in self._let_go:
            let_go()

    def _add(self, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for key, tensor in tensors:
            if key in self.state:
                raise InvalidInput(f"{key!r} is in {path.name} and in a different file of {path.parent}", key=key)
            self.state[key] = tensor

    def mapped(self, path: Path, header: Header) -> Iterator[tuple[str, torch.Tensor]]:
        """Map one file's tensors and yield them by key, without adding them to ``state``."""
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch requires writable memory
        self._let_go.append(partial(data.madvise, mmap.MADV_DONTNEED))
        view, start = memoryview(data), len(header.head)
        for tensor in header.tensors:
            yield tensor.key, tensor_over(view[start : start + tensor.nbytes], torch_dtype(tensor.dtype), tensor.shape)
            start += tensor.nbytes


# attachments


def _attachments(folder: Path, weights: Iterable[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the files to attach, by name, and the names of skipped files."""
    chosen: dict[str, Path] = {}
    skipped: list[str] = []
    left = MAX_ATTACHMENTS_BYTES
    used = set(weights)
    for name, path in _files(folder):
        if path in used:
            continue
        nbytes = path.stat().st_size if _is_attachable(folder, name, path) else MAX_ATTACHMENT_BYTES + 1
        if nbytes > min(left, MAX_ATTACHMENT_BYTES):
            skipped.append(name)
            continue
        left -= nbytes
        chosen[name] = path
    return chosen, skipped


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative names and the paths of the files in a folder tree, sorted, without hidden files.

    Git's files, such as .gitattributes, do not count as hidden. Links to folders are yielded but not followed.
    """
    for place, folders, names in os.walk(folder):
        names += [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") or name in _OF_GIT:
                path = Path(place, name)
                yield path.relative_to(folder).as_posix(), path


def _is_attachable(folder: Path, name: str, path: Path) -> bool:
    if not path.is_file() or is_index(name) or any(name.lower().endswith(suffix) for suffix in _WEIGHTS):
        return False
    if not is_attachment_name(name):
        return False
    return not path.is_symlink() or _leads_inside(folder, path)


def _leads_inside(folder: Path, link: Path) -> bool:
    """Return whether a link points into the folder or Hugging Face's cache, and therefore cannot reach other files."""
    homes = [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    return any(link.resolve().is_relative_to(home) for home in homes)
