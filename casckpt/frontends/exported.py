"""What an export has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from casckpt.checkpoint.handle import Checkpoint

Format: TypeAlias = Literal["hf", "safetensors", "dcp", "torch"]


@dataclass(frozen=True)
class Exported:
    """What an export wrote. ``left_out``: keys that are not in it. ``skipped``: names of attachments that are not.

    ``nbytes``: of all tensors. ``prefix``: what the keys of the checkpoint begin with, and the
    names in the files do not.
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
