"""Megatron-core's own save and load, without a strategy being given: taught to use ours, and put back.

Importing this module imports Megatron-core. Its training loop makes its strategies by itself, in another way in each
version, and wraps them (``--ckpt-fully-parallel-save``); what stays is the class of that strategy. So the methods of
that class hand folders over to ours, and all others to what was there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast

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
_NON_PERSISTENT = "non_persistent"  # the folder in --save of checkpoints that are not to stay

P = ParamSpec("P")
T = TypeVar("T")
_Undo: TypeAlias = Callable[[], None]
_base: Any = None
with suppress(ImportError):  # from 0.19 on
    _base = import_module("megatron.core.dist_checkpointing.strategies.base")
_installed: list[Installed] = []  # the one that is


def register_strategies(store: AnyStore | None = None) -> None:
    """Let Megatron-core load by itself what lies in a store: ``dist_checkpointing.load(state, folder)``.

    Its own loader, which it takes where it is given none, is taught to hand a folder over to ours if that says where in
    a store the checkpoint is; all others it loads as before. Up to 0.16 ours is in its registry too. ``store``: see
    `CasLoadShardedStrategy`.
    """
    _teach_loads(CasLoadShardedStrategy(store))


class Installed(ExitStack):
    """What `install` taught Megatron-core, until `undo`; as a context manager, until its end."""

    def __init__(self, saves: CasSaveShardedStrategy, loads: CasLoadShardedStrategy) -> None:
        super().__init__()
        self.saves, self.loads = saves, loads

    def undo(self) -> None:
        """Put back what was there. Saves in the background go on; a second call does nothing."""
        self.close()


def install(
    store: AnyStore,
    *,
    run: str,
    step: Callable[[Path], int | None] | None = None,
    fully_parallel: bool = False,
    forget_removed: bool = False,
    **options: Unpack[SaveArguments],
) -> Installed:
    """Let Megatron-core's training loop save into a store, and load from it; every rank makes the call, before it runs.

    What its strategy for ``torch_dist`` would save into a folder ``iter_<number>`` goes into the store, as the step of
    that number; in the folder stays what `CasSaveShardedStrategy` leaves there. Other folders are saved as before.
    Checkpoints in a folder ``non_persistent`` go to the run ``<run>-non-persistent``. ``step``: of a folder, None if it
    is to be saved as before.

    ``fully_parallel``, ``forget_removed``: of `CasSaveShardedStrategy`. ``options``: of `Store.save`; ``allow_pickle``
    for loads too. Raises Conflict if it is installed already.
    """
    if _installed:
        raise Conflict("Megatron-core saves into a store already; call undo() of what install() gave you")
    step_of = _iteration if step is None else step
    saves = CasSaveShardedStrategy(
        store, run=partial(_run_of, run), step=cast(StepOf, step_of), fully_parallel=fully_parallel,
        forget_removed=forget_removed, **options,
    )  # fmt: skip
    installed = Installed(saves, _Loads(saves.store, allow_pickle=options.get("allow_pickle", False)))

    def takes(folder: Folder) -> bool:
        return installed in _installed and step_of(Path(folder)) is not None

    for name in _SAVES:
        method = _handing_over(_ORIGINALS[name], getattr(saves, name), takes)
        installed.callback(_replaced(TorchDistSaveShardedStrategy, name, method))
    installed.callback(_teach_loads(installed.loads, lambda: installed in _installed))
    _installed.append(installed)
    installed.callback(_installed.remove, installed)
    return installed


class _Loads(CasLoadShardedStrategy):
    """From the store that a folder names: it may be that of another training, and has to be signed by the same."""

    def _place(self, folder: Folder) -> StoreRef:
        url, ref = pointed_at(folder)
        return StoreRef(as_trusting(url, self.store), ref)


def _run_of(run: str, folder: Path) -> str:
    return f"{run}-non-persistent" if folder.parent.name == _NON_PERSISTENT else run


def _iteration(folder: Path) -> int | None:
    found = _ITERATION.fullmatch(folder.name)
    return int(found[1]) if found else None


def _teach_loads(strategy: CasLoadShardedStrategy, active: Callable[[], bool] = lambda: True) -> _Undo:
    """Let Megatron's own loader hand folders of ours over to ``strategy``; what puts back what was there."""
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
        method = _handing_over(_ORIGINALS[name], getattr(strategy, name), takes)
        undo.callback(_replaced(TorchDistLoadShardedStrategy, name, method))
    return undo.close


def _registered(strategy: CasLoadShardedStrategy) -> _Undo:
    """The same in the registry that there is up to 0.16."""
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
    """Put a method into a class; what puts back what was there, unless somebody has put in another one since."""
    before = vars(kind).get(name)  # None: it is that of a class above
    setattr(kind, name, method)

    def undo() -> None:
        if vars(kind).get(name) is method:
            delattr(kind, name) if before is None else setattr(kind, name, before)

    return undo


def _handing_over(original: Callable[P, T], ours: Callable[..., T], takes: Callable[[Folder], bool]) -> Callable[P, T]:
    """A method of Megatron's, which calls ours for folders that it takes."""
    signature = inspect.signature(original)

    @wraps(original)
    def method(*arguments: P.args, **named: P.kwargs) -> T:
        folder = signature.bind(*arguments, **named).arguments["checkpoint_dir"]
        return ours(*arguments[1:], **named) if takes(folder) else original(*arguments, **named)

    return method
