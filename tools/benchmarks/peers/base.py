"""What the benchmark asks of whoever saves and loads."""

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
DCP_SAVE, DCP_LOAD, DCP_PART = "save through DCP", "load through DCP", "part through DCP"


@dataclass
class Part:
    """A box of a tensor: its place in the whole tensor, and the memory that takes it."""

    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Peer:
    """One way to save and load. Adapters are made once for each setting, so that they can keep caches and plans.

    ``best``: the settings worth trying for each kind of work; a kind that is not there is not offered. ``environment``:
    "" or one of `benchmarks.environments`. ``durable``: all is on the disk when ``save`` returns; otherwise the
    benchmark syncs files and folders, within the time that it measures. ``matters``: settings on which the files
    depend, so that loads with other settings can share a checkpoint.
    """

    name: ClassVar[str]
    environment: ClassVar[str] = ""
    durable: ClassVar[bool] = False
    best: ClassVar[Best]
    matters: ClassVar[Sequence[str]] = ()

    def __init__(self, setting: Setting, threads: int) -> None:
        """``threads``: how many cores there are."""
        self.setting = setting
        self.threads = threads

    @classmethod
    def as_saved(cls, setting: Setting) -> Setting:
        """The part of a setting on which the files depend."""
        return {name: value for name, value in setting.items() if name in cls.matters}

    @classmethod
    def verifies(cls, setting: Setting) -> bool:
        """Does a load compare what it read with digests?"""
        return False

    @classmethod
    def absent(cls) -> str | None:
        """Why it cannot be used here; None if it can."""
        return None

    def save(self, state: State, folder: Path) -> Mapping[str, float] | None:
        """Save into ``folder``. May return figures of its own."""
        raise NotImplementedError

    def load(self, state: State, folder: Path) -> Mapping[str, float] | None:
        """Fill the tensors of ``state``, which are allocated and touched."""
        raise NotImplementedError

    def load_part(self, parts: Mapping[str, Part], folder: Path) -> Mapping[str, float] | None:
        """Fill parts of tensors."""
        raise NotImplementedError

    def start_save(self, state: State, folder: Path) -> Callable[[], object]:
        """Begin to save. Returns once the state may change; what it returns waits for the end."""
        raise NotImplementedError

    def close(self) -> None:
        """End what runs in the background."""


def missing(*modules: str) -> str | None:
    """Why a peer cannot be used: the first of ``modules`` that cannot be imported."""
    from importlib import import_module

    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            return f"not installed ({error})"
    return None
