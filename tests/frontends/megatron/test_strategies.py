"""The real Megatron-core saves to a store and loads from it."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import casckpt
from casckpt.frontends import megatron
from tests.support import gpt
from tests.support.gpt import Topology, differences
from tests.support.logs import logged
from tests.support.megatron_core import core, module, own_state, theirs
from tests.support.ranks import Pool, outcome_of
from tests.support.scripts import run_script

SAVED = Topology(tp=2)  # only two ranks, because importing Megatron-core takes seconds on each


def saved_by_core(rank: int, size: int, path: Path, topology: Topology, **options: Any) -> None:
    folder = path / "iter_0000012"
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    core()
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="gpt", **options)
    state = theirs(own_state(rank, topology))
    core().save(state, str(folder), sharded_strategy=strategy, content_metadata={"form": "gpt"})


def loaded_by_core(rank: int, size: int, path: Path, topology: Topology, registered: bool = False) -> list[Any]:
    core()
    if registered:
        megatron.register_strategies()
    strategy = None if registered else megatron.CasLoadShardedStrategy()
    template = theirs(gpt.emptied(own_state(rank, topology)))
    found = core().load(template, str(path / "iter_0000012"), sharded_strategy=strategy)
    return differences(found, {**gpt.expected(own_state(rank, topology)), "content_metadata": {"form": "gpt"}})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, ranks: Pool) -> Path:
    folder = tmp_path_factory.mktemp("core")
    ranks.run(SAVED.size, saved_by_core, folder, SAVED)
    return folder


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(dp=2), Topology()], ids=str)
def test_megatron_core_loads_in_a_new_parallel_configuration(path: Path, topology: Topology, ranks: Pool) -> None:
    assert ranks.run(topology.size, loaded_by_core, path, topology) == [[]] * topology.size


def test_megatron_core_finds_the_strategy_that_casckpt_registers(path: Path, ranks: Pool) -> None:
    assert ranks.run(2, loaded_by_core, path, Topology(pp=2), registered=True) == [[], []]


def test_the_folder_records_which_checkpoint_it_belongs_to(path: Path) -> None:
    folder = path / "iter_0000012"
    assert sorted(file.name for file in folder.iterdir()) == ["casckpt.json", "common.pt", "metadata.json"]
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "casckpt"
    found = megatron.maybe_load_config(folder)
    assert found == megatron.maybe_load_config(f"{path}/store#gpt@12")


def test_a_save_by_megatron_core_also_stores_the_common_part(path: Path) -> None:
    where, topology = f"{path}/store#gpt@12", Topology()
    found = megatron.load(gpt.emptied(own_state(0, topology)), where)
    assert found.pop("content_metadata") == megatron.load_content_metadata(where) == {"form": "gpt"}
    assert differences(found, gpt.expected(own_state(0, topology))) == []
    attention = casckpt.open(path / "store").read("gpt@12", keys=["layers.attention"])["layers.attention"]
    assert attention.shape == (gpt.LAYERS, gpt.HIDDEN, gpt.HIDDEN)


def objects_of_core_in_our_functions(rank: int, size: int, where: str) -> list[Any]:
    topology = Topology(tp=2)
    megatron.save(theirs(own_state(rank, topology)), where)
    found = megatron.load(theirs(gpt.emptied(own_state(rank, topology))), where)
    return differences(found, gpt.expected(own_state(rank, topology)))


def test_casckpt_functions_accept_megatron_core_objects(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, objects_of_core_in_our_functions, f"{tmp_path}#a@1") == [[], []]


def mixed_state(rank: int, topology: Topology) -> dict[str, Any]:
    """The non-persistent values are Megatron-core's, because their class has no base class to register."""
    state = own_state(rank, topology)
    state["optimizer"]["param_groups"] = theirs(state["optimizer"]["param_groups"])
    return state


def test_casckpt_functions_accept_megatron_core_config_and_strictness(tmp_path: Path) -> None:
    config = core(".core").CheckpointingConfig("casckpt", 3)
    megatron.save_config(config, f"{tmp_path}#a@1")
    megatron.save_config(config, f"{tmp_path}#a@1")
    assert megatron.maybe_load_config(f"{tmp_path}#a@1") == megatron.CheckpointingConfig("casckpt", 3)
    strict = core(".validation").StrictHandling.RETURN_ALL
    assert megatron.load({}, f"{tmp_path}#a@1", strict=strict) == ({}, set(), set())


def our_objects_in_functions_of_core(rank: int, size: int, path: Path) -> list[Any]:
    core()
    topology = Topology(tp=2)
    strategy = megatron.CasSaveShardedStrategy(f"{path}/store", run="gpt", step=3, fully_parallel=True)
    core().save(mixed_state(rank, topology), str(path), sharded_strategy=strategy)
    found = core().load(gpt.emptied(mixed_state(rank, topology)), str(path), megatron.CasLoadShardedStrategy())
    return differences(found, gpt.expected(own_state(rank, topology)))


def test_megatron_core_accepts_casckpt_objects(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, our_objects_in_functions_of_core, tmp_path) == [[], []]


def other_entry_points(rank: int, size: int, path: Path) -> dict[str, Any]:
    core()
    megatron.register_strategies(path / "store")
    folder, mapping = str(path / "iter_0000012"), core(".mapping")
    asked = {"x": mapping.ShardedTensor.from_rank_offsets("nowhere", torch.ones(1))}
    returned = core().load(asked, folder, strict="return_all")
    norm = mapping.ShardedTensor.from_rank_offsets("layers.norm", torch.ones(4, 9, dtype=torch.bfloat16))
    return {
        "metadata": core().load_tensors_metadata(folder)["layers.norm"].global_shape,
        "plain": core().load_plain_tensors(folder)["layers.norm"].shape,
        "common": core().load_common_state_dict(folder)["iteration"],
        "sharded": core(".serialization").load_sharded_metadata(folder)["layers.norm"].dtype,
        "content": core(".serialization").load_content_metadata(folder),
        "missing": "layers._extra_state" in returned[1],
        "unexpected": returned[2],
        "absent": outcome_of(lambda: core().load(asked, folder)),
        "misshapen": outcome_of(lambda: core().load({"x": norm}, folder)),
        "are theirs": issubclass(type(outcome_of(lambda: core().load(asked, folder))), mapping.CheckpointingException),
    }


def test_other_entry_points_of_megatron_core_work(path: Path, ranks: Pool) -> None:
    (found,) = ranks.run(1, strings, path)
    assert found["metadata"] == (4, 8)
    assert found["plain"] == (4, 8)
    assert found["common"] == 7
    assert found["sharded"] == torch.bfloat16
    assert found["content"] == {"form": "gpt"}
    assert found["missing"] is True
    assert found["unexpected"] == {"nowhere"}
    assert "'nowhere'" in found["absent"]
    assert "[4, 9] here, but [4, 8]" in found["misshapen"]
    assert found["are theirs"] is True


def strings(rank: int, size: int, path: Path) -> dict[str, Any]:
    found = other_entry_points(rank, size, path)
    return {key: str(value) if isinstance(value, Exception) else value for key, value in found.items()}


def under_each_strictness(rank: int, size: int, path: Path) -> dict[str, Any]:
    """Load one stored key and one missing key. The checkpoint has further keys."""
    kinds, mapping = core(".validation").StrictHandling, core(".mapping")

    def load(strict: Any) -> Any:
        asked = {key: mapping.ShardedTensor.from_rank_offsets(key, torch.ones(4, 8)) for key in ("layers.norm", "x")}
        found = core().load(asked, str(path / "iter_0000012"), megatron.CasLoadShardedStrategy(), strict=strict)
        state, missing, unexpected = found if isinstance(found, tuple) else (found, None, None)
        return sorted(asked.keys() & state), unexpected, missing and "layers._extra_state" in missing

    found = {kind.value: outcome_of(lambda kind=kind: load(kind)) for kind in kinds}  # type: ignore[misc] # mypy has no type for a lambda with a default
    return {name: "raises" if isinstance(one, Exception) else one for name, one in found.items()}


def test_each_strictness_handles_missing_and_unexpected_keys(path: Path, ranks: Pool) -> None:
    left_out = (["layers.norm"], None, None)
    (found,) = ranks.run(1, under_each_strictness, path)
    assert found == {
        **dict.fromkeys(["assume_ok_unexpected", "raise_unexpected", "raise_all"], "raises"),
        **dict.fromkeys(["log_unexpected", "log_all", "ignore_all"], left_out),
        "return_unexpected": (["layers.norm"], {"x"}, set()),
        "return_all": (["layers.norm"], {"x"}, True),
    }


def in_the_background(rank: int, size: int, path: Path) -> list[Any]:
    core()
    topology = Topology(dp=2)
    wrapper = core(".strategies.fully_parallel").FullyParallelSaveStrategyWrapper
    strategy = wrapper(megatron.CasSaveShardedStrategy(f"{path}/store", run="gpt", step=lambda folder: 5))
    state = theirs(own_state(rank, topology))
    request = core().save(state, str(path), strategy, async_sharded_save=True)
    before = (path / "metadata.json").exists()
    for value in megatron.nested_values(state):
        if megatron.extract_sharded_tensors([value])[0]:
            value.data.zero_()
    request.execute_sync()
    found = core().load(theirs(gpt.emptied(own_state(rank, topology))), str(path), megatron.CasLoadShardedStrategy())
    return [before, *differences(found, gpt.expected(own_state(rank, topology)))]


def test_the_wrapper_of_megatron_core_saves_in_the_background(tmp_path: Path, ranks: Pool) -> None:
    assert ranks.run(2, in_the_background, tmp_path) == [[False], [False]]
    assert "gpt@5" in casckpt.open(tmp_path / "store")


def as_from_019_on(rank: int, size: int, path: Path) -> list[Any]:
    """The common part is an object, and only the strategy writes common.pt."""
    core()
    common = megatron.ShardedObject("common_state", COMMON, (1,), (0,), replica_id=rank)
    part = megatron.ShardedTensor.from_rank_offsets("w", torch.full((2,), rank), (0, rank, size))
    megatron.CasSaveShardedStrategy(path / "store", run="a").save({"common_state": common, "w": part}, path / "iter_4")
    template = {"w": part.without_data()}
    loaded = megatron.CasLoadShardedStrategy().load(template, path / "iter_4", async_strategy="nvrx")
    return [loaded["w"].tolist(), (path / "iter_4/common.pt").exists(), megatron.load({}, f"{path}/store#a@4")]


def called_by_itself(rank: int, size: int, path: Path, wrapped: bool) -> list[Any]:
    core()
    strategy: Any = megatron.CasSaveShardedStrategy(path / "store", run="a")
    if wrapped:
        strategy = core(".strategies.fully_parallel").FullyParallelSaveStrategyWrapper(strategy)
    part = megatron.ShardedTensor.from_rank_offsets("w", torch.full((2,), rank), (0, rank, size))
    strategy.save({"w": part}, path / "iter_4")
    template = {"w": part.without_data()}
    loaded = megatron.CasLoadShardedStrategy().load(dict(template), path / "iter_4")
    found = megatron.load(dict(template), f"{path}/store#a@4")
    return [loaded["w"].tolist(), {**found, "w": found["w"].tolist()}, sorted(os.listdir(path / "iter_4"))]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_strategy_can_be_called_directly(tmp_path: Path, ranks: Pool, wrapped: bool) -> None:
    """There is neither a common.pt nor a folder. Megatron's own strategies do not need them either."""
    files = ["casckpt.json"]
    wanted = [[[0, 0], {"w": [0, 0]}, files], [[1, 1], {"w": [1, 1]}, files]]
    assert ranks.run(2, called_by_itself, tmp_path, wrapped) == wanted


def with_replicas_that_differ(rank: int, size: int, path: Path) -> list[str]:
    core()
    outcomes = []
    for step, check in enumerate(("sample", "raise", "off")):
        part = megatron.ShardedTensor.from_rank_offsets("w", torch.full((20,), 1.0 + rank), replica_id=rank)
        strategy = megatron.CasSaveShardedStrategy(path / "store", run="a", check_replicas=check)  # type: ignore[arg-type]
        outcomes.append(str(outcome_of(partial(strategy.save, {"w": part}, path / f"iter_{step}"))))
    return outcomes


def test_a_strategy_compares_replicas_on_request(tmp_path: Path, ranks: Pool) -> None:
    for sampled, whole, _ in ranks.run(2, with_replicas_that_differ, tmp_path):
        assert "'w' differs between ranks 0 and 1" in sampled
        assert "'w' differs between ranks 0 and 1" in whole
    assert casckpt.open(tmp_path / "store").read("a@2")["w"].tolist() == [1.0] * 20


COMMON = {"iteration": 9, "args": Namespace(lr=0.1)}


def test_the_common_part_can_be_an_object(tmp_path: Path, ranks: Pool) -> None:
    (tmp_path / "iter_4").mkdir()
    assert ranks.run(2, as_from_019_on, tmp_path) == [[[0, 0], True, COMMON], [[1, 1], True, COMMON]]


def saved_twice(rank: int, size: int, path: Path) -> list[Any]:
    core()
    state = {"w": megatron.ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    again = {"w": megatron.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    megatron.CasSaveShardedStrategy(path / "store", run="a").save(state, path)
    megatron.CasSaveShardedStrategy(path / "store", run="a").save(again, path)
    careful = megatron.CasSaveShardedStrategy(path / "store", run="a", overwrite=False)
    found = megatron.CasLoadShardedStrategy().load({"w": state["w"].without_data()}, path)
    return [found["w"].tolist(), str(outcome_of(lambda: careful.save(state, path)))]


def test_an_existing_step_is_replaced(tmp_path: Path, ranks: Pool) -> None:
    (tmp_path / "iter_4").mkdir()
    (tmp_path / "iter_4/common.pt").write_bytes(b"")
    ((found, refusal),) = ranks.run(1, saved_twice, tmp_path / "iter_4")
    assert found == [0, 0]
    assert "a@4 already exists" in refusal


def refused(rank: int, size: int, path: Path) -> list[str]:
    core()
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="a")
    state = {"w": megatron.ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    load = megatron.CasLoadShardedStrategy()
    (path / "bad").mkdir()
    (path / "bad/common.pt").write_bytes(b"")
    (path / "bad/casckpt.json").write_text("[]")
    (path / "odd/casckpt.json").mkdir(parents=True)
    (path / "number").mkdir()
    (path / "number/casckpt.json").write_text('{"store": 5, "run": "a", "step": 1}')
    calls = [
        lambda: strategy.save(state, path / "bad"),
        lambda: load.load(state, path),
        lambda: load.load(state, path / "bad"),
        lambda: load.load(state, path / "odd"),
        lambda: load.load(state, path / "number"),
        lambda: load.check_backend_compatibility("torch_dist"),
        lambda: load.check_version_compatibility(2),
    ]
    return [str(outcome_of(call)) for call in calls]


def test_strategies_reject_unsupported_arguments(tmp_path: Path, ranks: Pool) -> None:
    (found,) = ranks.run(1, refused, tmp_path)
    parts = [
        "not end in a number",
        "was not saved with CasSave",
        *["does not specify where"] * 3,
        "'torch_dist'",
        "version 2",
    ]
    assert [part in text for part, text in zip(parts, found, strict=True)] == [True] * 7, found


def first_saves(rank: int, size: int, path: Path) -> list[str]:
    """Return the log about enums in the arguments of two saves."""
    core()
    backend = module("megatron.core.transformer.enums").AttnBackend.flash
    part = megatron.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, size))
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="a")
    with logged("casckpt.frontends.megatron.strategies") as said:
        for step in (1, 2):
            if rank == 0:
                (path / f"iter_{step}").mkdir()
            dist.barrier()
            state = {"args": Namespace(lr=1, backend=backend, kinds=[backend]), "w": part}
            core().save(state, str(path / f"iter_{step}"), strategy)
    found = core().load({"w": part}, str(path / "iter_2"), megatron.CasLoadShardedStrategy())
    assert found["args"].backend is backend
    return said


def test_the_first_save_logs_classes_that_other_loads_need(tmp_path: Path, ranks: Pool) -> None:
    (said,), other = ranks.run(2, first_saves, tmp_path)
    assert "holds megatron.core.transformer.enums.AttnBackend. " in said
    assert "allow_pickle=True" in said
    assert other == []
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from casckpt.frontends.megatron import load_common_state_dict as load\n"
        "try: load(sys.argv[1])\nexcept ValueError as error: print(error)"
    )
    done = run_script(script, f"{tmp_path}/store#a@2")
    assert (
        "common.pt of a@2 needs to be unpickled (it contains megatron.core.transformer.enums.AttnBackend)"
        in done.printed
    )
    assert "Importing megatron.core registers" in done.printed
