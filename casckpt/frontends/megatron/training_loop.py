"""Lets Megatron-core's training loop save into a store and load from it, without a strategy argument.

Importing this module imports Megatron-core. Each version of the training loop creates its strategies in a different
way and wraps them (``--ckpt-fully-parallel-save``), but the strategy's class is always the same. Therefore, `install`
replaces methods of that class. They call our strategies for folders that belong to a store, and the original methods
for all other folders.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, Unpack, cast

from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from casckpt.errors import Conflict
from casckpt.frontends.megatron.config import BACKEND, VERSION
from casckpt.frontends.megatron.folders import Folder, is_pointed, pointed_at
from casckpt.frontends.megatron.place import StoreRef
from casckpt.frontends.megatron.strategies import CasLoadShardedStrategy, CasSaveShardedStrategy, StepOf
from casckpt.frontends.stores import AnyStore, as_trusting, check_foreign
from casckpt.saving.options import SaveArguments

_LOADS = ("load", "load_tensors_metadata", "load_sharded_metadata")
_SAVES = ("save", "async_save")
_ORIGINALS: dict[str, Callable[..., Any]] = {
    **{name: getattr(TorchDistLoadShardedStrategy, name) for name in _LOADS},
    **{name: getattr(TorchDistSaveShardedStrategy, name) for name in _SAVES},
}
_ITERATION = re.compile(r"iter_([0-9]+)")
_NON_PERSISTENT = "non_persistent"  # the folder for temporary checkpoints inside --save

_Undo: TypeAlias = Callable[[], None]
_Method: TypeAlias = Callable[..., Any]
_base: Any = None
with suppress(ImportError):  # from 0.19 on
    _base = import_module("megatron.core.dist_checkpointing.strategies.base")
_installed: list[Installed] = []  # at most one item


def register_strategies(store: AnyStore | None = None) -> None:
    """Let Megatron-core's ``dist_checkpointing.load(state, folder)`` load from a store without a strategy.

    Megatron's default loader then calls our strategy for a folder that names a checkpoint in a store. It loads all
    other folders as before. Up to 0.16, our strategy is also added to Megatron's registry. ``store``: see
    `CasLoadShardedStrategy`.
    """
    _replace_loads(CasLoadShardedStrategy(store))


class Installed(ExitStack):
    """The changes that `install` made to Megatron-core. `undo` or leaving the context manager reverts them."""

    def undo(self) -> None:
        """Restore the original methods. Background saves continue. A second call has no effect."""
        self.close()


def install(
    store: AnyStore,
    *,
    run: str,
    step: Callable[[Path], int | None] | None = None,
    fully_parallel: bool = False,
    **options: Unpack[SaveArguments],
) -> Installed:
    """Let Megatron-core's training loop save into a store and load from it. Every rank calls this before the loop.

    A checkpoint that the ``torch_dist`` strategy would save into a folder ``iter_<number>`` is saved to the store
    instead, with that number as its step. The folder holds what `CasSaveShardedStrategy` writes there. Other folders
    are saved as before. Checkpoints in a folder ``non_persistent`` are saved to the run ``<run>-non-persistent``.
    ``step``: a function that returns the step for a folder, or None to save the folder as before.

    ``fully_parallel``: see `CasSaveShardedStrategy`. ``options``: those of `Store.save`; ``allow_pickle`` also applies
    to loads. Raises Conflict if `install` is already in effect.
    """
    if _installed:
        raise Conflict("Megatron-core already saves into a store; call undo() on the result of install()")
    step_of = _iteration if step is None else step
    loads = _Loads(store, allow_pickle=options.get("allow_pickle", False))
    saves = CasSaveShardedStrategy(
        loads.store or store, run=partial(_run_of, run), step=cast(StepOf, step_of), fully_parallel=fully_parallel,
        loads=loads, **options,
    )  # fmt: skip
    installed = Installed()

    def takes(folder: Folder) -> bool:
        return installed in _installed and step_of(Path(folder)) is not None

    for name in _SAVES:
        method = _dispatching(_ORIGINALS[name], getattr(saves, name), takes)
        installed.callback(_replaced(TorchDistSaveShardedStrategy, name, method))
    installed.callback(_replace_loads(loads, lambda: installed in _installed))
    _installed.append(installed)
    installed.callback(_installed.remove, installed)
    return installed


class _Loads(CasLoadShardedStrategy):
    """A strategy that loads from the store that a folder names, and requires the same signatures as ``store``."""

    def _place(self, folder: Folder) -> StoreRef:
        url, ref = pointed_at(folder)
        return StoreRef(as_trusting(url, self.store), ref)


def _run_of(run: str, folder: Path) -> str:
    return f"{run}-non-persistent" if folder.parent.name == _NON_PERSISTENT else run


def _iteration(folder: Path) -> int | None:
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def _replace_loads(strategy: CasLoadShardedStrategy, active: Callable[[], bool] = lambda: True) -> _Undo:
    """Make Megatron's own loader call ``strategy`` for our folders. Return a function that restores the loader."""
    undo = ExitStack()
    undo.callback(_registered(strategy))

    def takes(folder: Folder) -> bool:
        if not active():
            return False
        if not is_pointed(folder):
            check_foreign(strategy.store, folder)
            return False
        return True

    for name in _LOADS:
        method = _dispatching(_ORIGINALS[name], getattr(strategy, name), takes)
        undo.callback(_replaced(TorchDistLoadShardedStrategy, name, method))
    return undo.close


def _registered(strategy: CasLoadShardedStrategy) -> _Undo:
    """Register ``strategy`` in the registry that exists up to 0.16."""
    register = getattr(_base, "register_default_strategy", None)
    if register is None:
        return lambda: None
    _base.LoadShardedStrategy.register(CasLoadShardedStrategy)
    action = _base.StrategyAction.LOAD_SHARDED
    known, key = _base.default_strategies[action.value], (BACKEND, VERSION)
    before = known.get(key)
    register(action, *key, strategy)

    def undo() -> None:
        if before is None:
            known.pop(key, None)
        else:
            known[key] = before

    return undo


def _replaced(kind: type, name: str, method: Callable[..., Any]) -> _Undo:
    """Set a method of a class. Return a function that restores the old method unless it has been replaced again."""
    before = vars(kind).get(name)  # None if the method is inherited
    setattr(kind, name, method)

    def undo() -> None:
        if vars(kind).get(name) is method:
            delattr(kind, name) if before is None else setattr(kind, name, before)

    return undo


def _dispatching(original: _Method, ours: _Method, takes: Callable[[Folder], bool]) -> _Method:
    """Return a method that calls ``ours`` for folders that ``takes`` accepts, and ``original`` for all others."""
    signature = inspect.signature(original)

    @wraps(original)
    def method(*arguments: Any, **named: Any) -> Any:
        folder = signature.bind(*arguments, **named).arguments["checkpoint_dir"]
        return ours(*arguments[1:], **named) if takes(folder) else original(*arguments, **named)

    return method
