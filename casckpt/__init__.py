"""casckpt keeps checkpoints of PyTorch training runs in a store, which holds identical bytes only once.

::

    import casckpt

    store = casckpt.open("checkpoints")            # a folder, or memory://
    store.save({"model": model.state_dict()}, run="sft", step=100)
    store.load({"model": model.state_dict()}, "sft@latest")

The path of the bytes::

    save    state ---> shards ---> cells ---> digests --- known ----> an extent that another checkpoint has written
            of all     regions,    at most    BLAKE3   `- new ------> a blob: safetensors, about 32 MiB, put once
            ranks      no copies   1 MiB                                |
                                                                        v
                                   rank 0: the extents cover every tensor ---> manifest ---> commit: it is visible

    load    reference ---> commit ---> manifest ---> the regions that this rank wants ---> overlaps with extents
                                                                                              |
            tensors, filled in place <--- cells, each compared with its digest <--- ranged reads, merged blob by blob

docs/design.md lists the packages.

This module imports each name when a program first uses it, so code that does not use tensors does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from casckpt import errors as errors
from casckpt._version import __version__ as __version__
from casckpt.store import exports as _exports
from casckpt.store import objects as _objects

if TYPE_CHECKING:
    from casckpt.cli.progress import progress_bar as progress_bar
    from casckpt.contents.checkpoint import Checkpoint as Checkpoint
    from casckpt.frontends.interchange.export import export as export
    from casckpt.frontends.trainer import Checkpointer as Checkpointer
    from casckpt.frontends.trainer import SaveOnSignal as SaveOnSignal
    from casckpt.frontends.trainer import TrainState as TrainState
    from casckpt.frontends.training_state import flatten_optimizer_state as flatten_optimizer_state
    from casckpt.frontends.training_state import hub_files as hub_files
    from casckpt.frontends.training_state import load_model_and_optim_state as load_model_and_optim_state
    from casckpt.frontends.training_state import save_model_and_optim_state as save_model_and_optim_state
    from casckpt.frontends.training_state import unflatten_optimizer_state as unflatten_optimizer_state
    from casckpt.frontends.training_state import unshard_model_state as unshard_model_state
    from casckpt.frontends.training_state import unshard_optim_state as unshard_optim_state
    from casckpt.store.opening import at as at
    from casckpt.store.opening import open as open
    from casckpt.store.store import Store as Store
    from casckpt.tensors.kinds import register_wrapper as register_wrapper
    from casckpt.tensors.values import PerRank as PerRank
    from casckpt.tensors.values import Shard as Shard

_HOME = {
    "Checkpoint": "casckpt.contents.checkpoint",
    "Checkpointer": "casckpt.frontends.trainer",
    "PerRank": "casckpt.tensors.values",
    "SaveOnSignal": "casckpt.frontends.trainer",
    "Shard": "casckpt.tensors.values",
    "Store": "casckpt.store.store",
    "TrainState": "casckpt.frontends.trainer",
    "at": "casckpt.store.opening",
    "export": "casckpt.frontends.interchange.export",
    "flatten_optimizer_state": "casckpt.frontends.training_state",
    "hub_files": "casckpt.frontends.training_state",
    "load_model_and_optim_state": "casckpt.frontends.training_state",
    "open": "casckpt.store.opening",
    "progress_bar": "casckpt.cli.progress",
    "register_wrapper": "casckpt.tensors.kinds",
    "save_model_and_optim_state": "casckpt.frontends.training_state",
    "unflatten_optimizer_state": "casckpt.frontends.training_state",
    "unshard_model_state": "casckpt.frontends.training_state",
    "unshard_optim_state": "casckpt.frontends.training_state",
}

__all__ = ["__version__", "errors"]
__all__ += list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # from now on, Python finds the name without calling this function
    return value


def __dir__() -> list[str]:
    return __all__


_exports.exporter = lambda: __getattr__("export")  # front ends are above the store, which must not import them
_exports.importer = lambda: import_module("casckpt.frontends.files.importing").import_files
_exports.merger = lambda: import_module("casckpt.frontends.merging").merge
_objects.home = lambda: import_module("casckpt.frontends.training_state.objects")  # for modules and optimizers
