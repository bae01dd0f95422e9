"""The interface of every peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    import torch

    State: TypeAlias = dict[str, torch.Tensor]

Setting: TypeAlias = dict[str, Any]
Best: TypeAlias = Mapping[str, Sequence[Setting]]
SAVE, LOAD, PART, ASYNC, RANKS, RESTART = "save", "load", "part", "async", "ranks", "restart"
MAPPED = "mapped"
TO_BUCKET, FROM_BUCKET = "to a bucket", "from a bucket"
DCP_SAVE, DCP_LOAD, DCP_PART = "save through DCP", "load through DCP", "part through DCP"


@dataclass
class Part:
    """A part of a tensor: its position in the whole tensor, and its memory."""

    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Peer:
    """A way to save and load.

    The benchmark creates one adapter for each setting, so that it can keep caches and plans.

    ``best``: the settings to try for each kind of work. A missing kind is not supported. ``environment``: "" or one of
    `benchmarks.environments`. ``durable``: whether all bytes are on disk when ``save`` returns. Otherwise, the
    benchmark syncs files and folders within the measured time. ``matters``: the settings that change the files. Loads
    that differ only in other settings can share a checkpoint.
    """

    name: ClassVar[str]
    environment: ClassVar[str] = ""
    durable: ClassVar[bool] = False
    best: ClassVar[Best]
    matters: ClassVar[Sequence[str]] = ()

    def __init__(self, setting: Setting, threads: int) -> None:
        """``threads``: the number of cores."""
        self.setting = setting
        self.threads = threads

    @classmethod
    def as_saved(cls, setting: Setting) -> Setting:
        """Return the part of a setting that affects the files."""
        return {name: value for name, value in setting.items() if name in cls.matters}

    @classmethod
    def verifies(cls, setting: Setting) -> bool:
        """Return whether a load verifies digests."""
        return False

    @classmethod
    def absent(cls) -> str | None:
        """Return the reason why the peer cannot be used here, or None if it can."""
        return None

    def save(self, state: State, folder: Path) -> Mapping[str, float] | None:
        """Save into ``folder``. This may return additional figures."""
        raise NotImplementedError

    def load(self, state: State, folder: Path) -> Mapping[str, float] | None:
        """Fill the tensors of ``state``, which are allocated and touched, or keep new memory for `hand_over`."""
        raise NotImplementedError

    def hand_over(self, state: State) -> None:
        """Fill ``state`` after a load that returned new memory, as its users have it. This is not measured."""

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> Mapping[str, float] | None:
        """Fill parts of tensors."""
        raise NotImplementedError

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """Begin to save. Return as soon as the state may change. The returned function waits for the end."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish background work."""


def missing(*modules: str) -> str | None:
    """Return the reason why a peer cannot be used: the first of ``modules`` that cannot be imported."""
    from importlib import import_module

    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            return f"not installed ({error})"
    return None
