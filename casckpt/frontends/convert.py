"""Converters that import checkpoints of other formats into a store and export them, in bounded memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from casckpt.base.text import is_url, local_path
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.dcp.converters import casckpt_to_dcp, dcp_to_casckpt
from casckpt.frontends.dcp.folder import METADATA as DCP_METADATA
from casckpt.frontends.interchange.olmo_import import METADATA as OLMO_METADATA
from casckpt.frontends.interchange.olmo_import import MODEL_AND_OPTIM, PARTS, import_olmo, import_olmo_trainer
from casckpt.frontends.interchange.safetensors.exporting import export_safetensors
from casckpt.frontends.interchange.safetensors.importing import ImportSources, find_sources, import_safetensors
from casckpt.frontends.interchange.torch_files import casckpt_to_torch_save, torch_save_to_casckpt
from casckpt.frontends.stores import AnyStore
from casckpt.saving.options import ImportArguments
from casckpt.storage import open_files
from casckpt.storage.failures import reporting
from casckpt.store.exports import Exported

log = logging.getLogger(__name__)

__all__ = [
    "DetectedFormat",
    "Exported",
    "ImportSources",
    "casckpt_to_dcp",
    "casckpt_to_torch_save",
    "dcp_to_casckpt",
    "export_safetensors",
    "find_sources",
    "import_any",
    "import_olmo",
    "import_olmo_trainer",
    "import_safetensors",
    "look_at",
    "looked_at",
    "torch_save_to_casckpt",
]

_ZIP, _PICKLES = b"PK\x03\x04", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class DetectedFormat:
    """The format of a file or folder. ``kind``: "safetensors", "torch", "dcp", "olmo" or "olmo-trainer".

    ``path``: a local path, or a URL that the import reads directly. ``url``: the URL if the files at ``path`` are a
    temporary copy.
    """

    kind: str
    path: Path | str
    sources: ImportSources
    url: str = ""

    @property
    def nbytes(self) -> int:
        """The total bytes of the files with weights."""
        return self.sources.nbytes

    @property
    def origin(self) -> dict[str, str]:
        """The lineage of an import: the ``path`` or URL without passwords and parameters."""
        if not isinstance(self.path, Path):
            return {"path": _public(self.path)}
        named = os.fsencode(self.path.absolute()).decode(errors="replace")
        return {"path": _public(self.url) if self.url else named}


@contextmanager
def looked_at(path: str | os.PathLike[str]) -> Iterator[DetectedFormat]:
    """Call `look_at` for a path or a URL.

    If the import requires local files, they are first copied to a temporary folder.
    """
    if not is_url(path):
        yield look_at(local_path(path))
        return
    url, names = os.fspath(path), open_files(path).names()
    kind = _kind_of_folder(names.__contains__)
    if kind in ("dcp", "olmo-trainer"):
        yield DetectedFormat(kind, url, ImportSources((), {}))
        return
    from casckpt.storage.remote.files import RemoteFiles  # fsspec takes a while to import

    with TemporaryDirectory(prefix="casckpt-") as folder:
        yield replace(look_at(RemoteFiles(url).fetch(Path(folder))), url=url)


def _public(url: str) -> str:
    return re.sub("(?<=://)[^/@]*:[^/@]*@", "", url).partition("?")[0]


def look_at(path: str | os.PathLike[str]) -> DetectedFormat:
    """Detect the format of ``path`` and the files that an import would read.

    Raises NotFound, InvalidInput or Unsupported, naming the format, and StorageError if a file cannot be read.
    """
    given = Path(path).expanduser()
    with _reading(given):
        kind = _kind_of_folder(lambda name: (given / name).is_file()) if given.is_dir() else _kind_of_file(given)
        if kind == "safetensors":
            return DetectedFormat(kind, given, find_sources(given))
        suffix = ".safetensors" if kind == "olmo" else ".distcp"
        weights = [given] if kind == "torch" else sorted(file for file in given.rglob(f"*{suffix}") if file.is_file())
        return DetectedFormat(kind, given, ImportSources(tuple(weights), {}))


def _kind_of_folder(has: Callable[[str], bool]) -> str:
    """Return the format of a folder. ``has``: returns whether it has a file."""
    if has(DCP_METADATA):
        return "dcp"
    if has(f"{MODEL_AND_OPTIM}/{DCP_METADATA}"):
        return "olmo-trainer"
    is_olmo = any(has(f"{name}/{OLMO_METADATA}") for name in PARTS)
    return "olmo" if is_olmo or (has(OLMO_METADATA) and has("rank_0.safetensors")) else "safetensors"


def _kind_of_file(path: Path) -> str:
    if not path.exists():
        raise NotFound(f"there is no file or folder {path}; pass the path of the checkpoint to import")
    if not path.is_file():  # opening a pipe without a writer would block
        raise InvalidInput(f"{path} is neither a file nor a folder; write its output to a file, and import that file")
    with path.open("rb") as file:
        head = file.read(4)
    return "torch" if head == _ZIP or head[:2] in _PICKLES else "safetensors"


def import_any(
    store: AnyStore,
    detected: DetectedFormat,
    *,
    step: int,
    allow_pickle: bool = False,
    as_is: bool = False,
    parameter_names: Sequence[str] | None = None,
    **options: Unpack[ImportArguments],
) -> Checkpoint:
    """Import a checkpoint with the import function for its detected format. ``options``: those of `ImportArguments`.

    ``as_is``, ``parameter_names``: for a torch.save file; other formats are always saved unchanged. The checkpoint's
    ``lineage`` names the path.
    """
    log.info("reading %s as %s", detected.path, detected.kind)
    with _reading(detected.path):
        options.setdefault("lineage", {"imported_from": detected.origin})
        if detected.kind == "safetensors":
            return import_safetensors(store, detected.path, step=step, **options)
        if detected.kind == "torch":
            return torch_save_to_casckpt(
                detected.path, store, step=step, allow_pickle=allow_pickle, as_is=as_is,
                parameter_names=parameter_names, **options,
            )  # fmt: skip
        others = {"dcp": dcp_to_casckpt, "olmo": import_olmo, "olmo-trainer": import_olmo_trainer}
        return others[detected.kind](detected.path, store, step=step, allow_pickle=allow_pickle, **options)


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        with reporting("read", Path(error.filename or path)):  # which leaves casckpt's own errors as they are
            raise
