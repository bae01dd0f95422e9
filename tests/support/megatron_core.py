"""The real Megatron-core. Only tests that need it import it, because the import takes seconds and issues warnings."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version

from casckpt.frontends import megatron
from tests.support import gpt
from tests.support.gpt import Topology

VERSION = Version(version("megatron-core"))


def since(wanted: str, what: str) -> pytest.MarkDecorator:
    """Skip a test that requires a later Megatron-core than the installed one."""
    return pytest.mark.skipif(Version(wanted) > VERSION, reason=f"{what} came with Megatron-core {wanted}")


def core(name: str = "") -> Any:
    """Return a module of ``megatron.core.dist_checkpointing``, or the package itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("megatron.core.dist_checkpointing.strategies.torch")
        import_module("casckpt.frontends.megatron.strategies")
        if find_spec("megatron.core.safe_globals"):  # see `preload_megatron`
            import_module("megatron.core.safe_globals").register_safe_globals()
        return import_module(f"megatron.core.dist_checkpointing{name}")


def module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def theirs(state: Any) -> Any:
    """Return a sharded state dict with Megatron-core objects in place of ours."""
    mapping = core(".mapping")

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, megatron.LocalNonpersistentObject):
            return mapping.LocalNonpersistentObject(leaf.unwrap())
        if not isinstance(leaf, megatron.ShardedBase):
            return leaf
        values = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}  # type: ignore[arg-type]  # all of them are dataclasses
        if isinstance(leaf, megatron.ShardedTensorFactory):
            values["build_fn"] = lambda *arguments: theirs(leaf.build_fn(*arguments))
        return getattr(mapping, type(leaf).__name__)(**values)

    return megatron.dict_list_map_outplace(converted, state)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Make Megatron-core code work that requires a GPU or creates tensors on one."""
    with (
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
    ):
        yield


def own_state(rank: int, topology: Topology) -> dict[str, Any]:
    """Return the state, from version 0.16 on without its flat part, which Megatron-core no longer accepts."""
    state = gpt.state(topology.at(rank))
    if Version("0.16") <= VERSION:
        del state["optimizer"]["flat"]
    return state


def strategies_of_the_loop(context: dict[str, Any], folder: Path, *, fully_parallel: bool) -> tuple[Any, Any]:
    """Return the strategies that Megatron's training loop creates for saves and loads."""
    torch_dist, wrappers = core(".strategies.torch"), core(".strategies.fully_parallel")
    serialization = core(".serialization")
    if "save" not in context:
        later = Version("0.17") <= VERSION
        save = torch_dist.TorchDistSaveShardedStrategy() if later else serialization.get_default_save_sharded_strategy()
        context["save"] = wrappers.FullyParallelSaveStrategyWrapper(save) if fully_parallel else save
    if not (folder / "metadata.json").exists():
        return context["save"], None
    if Version("0.17") <= VERSION:
        return context["save"], torch_dist.TorchDistLoadShardedStrategy()
    return context["save"], serialization.get_default_load_sharded_strategy(str(folder))
