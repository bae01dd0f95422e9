"""Export and merge types, and the hooks through which `Store.export` and `Store.merge` find their functions.

Formats and the names of model parts belong to front ends, which are above the store, so `casckpt` sets the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

from casckpt.saving.options import ImportArguments

if TYPE_CHECKING:
    import torch

    from casckpt.base.progress import Shown
    from casckpt.contents.checkpoint import Checkpoint
    from casckpt.loading.options import Rename
    from casckpt.plan.averages import Weight

CAST: Final = ("float32", "float16", "bfloat16")
"""The dtypes to which exports convert."""
Format: TypeAlias = Literal["hf", "safetensors", "dcp", "torch", "files"]


class FileOptions(TypedDict, total=False):
    """Options for exports to a single file."""

    force: bool
    allow_pickle: bool
    progress: Shown | None


class ExportOptions(FileOptions, total=False):
    """The keyword arguments of `casckpt.export`."""

    format: Format | None
    keys: Sequence[str] | None
    strip_prefix: str | None
    rename: Rename
    max_shard_size: int | str | None
    metadata: Mapping[str, str] | None
    dtype: str | torch.dtype | None
    attachments: bool


class MergeOptions(TypedDict, total=False):
    """The keyword arguments of `casckpt.Store.merge`, except run and step."""

    weights: Sequence[Weight] | None
    ema: Weight | None
    keys: Sequence[str] | None
    keep: Sequence[str] | None
    dtype: str | torch.dtype | None
    overwrite: bool
    metadata: Mapping[str, Any] | None
    progress: Shown | None


@dataclass(frozen=True)
class Exported:
    """The result of an export. ``left_out``: the keys that were not exported.

    ``skipped``: the attachments that were not exported. ``nbytes``: the total size of all tensors. ``prefix``: the
    prefix common to all keys, which is omitted from the names in the files. ``notes``: what is unusual about the
    files, such as config.json tying tensors that differ.
    """

    checkpoint: Checkpoint
    files: tuple[Path | str, ...]
    tensors: int
    nbytes: int
    attachments: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    format: Format = "safetensors"
    prefix: str = ""
    notes: tuple[str, ...] = ()


class ImportFilesArguments(ImportArguments, total=False):
    """The keyword arguments of `Store.import_files`, except the step."""

    follow_links: bool


exporter: Callable[[], Callable[..., Exported]]
"""A function that imports and returns `casckpt.export`. The `casckpt` module sets it on import."""

merger: Callable[[], Callable[..., Checkpoint]]
"""A function that imports and returns `casckpt.frontends.merging.merge`. The `casckpt` module sets it on import."""

importer: Callable[[], Callable[..., Checkpoint]]
"""A function that imports and returns `casckpt.frontends.files.importing.import_files`."""
