"""A load fills everything, logs how much is not filled, or raises an error.

This holds for each front end, with the names of real models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import casckpt
from casckpt.errors import CasckptError, InvalidInput, Mismatch, MissingKey
from casckpt.frontends.trainer import Checkpointer
from casckpt.frontends.training_state import load_model_and_optim_state, save_model_and_optim_state
from tests.support.logs import logged
from tests.support.ranks import Pool
from tests.support.renames import rename_in
from tests.support.saves import new_run, small, small_folder

Load = Callable[..., Any]


def model_of(names: Iterable[str], value: float = 0.0) -> nn.Module:
    """Return a model whose parameters have these names and two elements each."""
    top = nn.Module()
    for name in names:
        *above, last = name.split(".")
        module = top
        for part in above:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            child = module._modules[part]
            assert child is not None
            module = child
        module.register_parameter(last, nn.Parameter(torch.full((2,), float(value))))
    return top


def by_function(store: casckpt.Store, ref: str, *what: Any, **options: Any) -> None:
    load_model_and_optim_state(store, ref, *what, **options)


def by_checkpointer(store: casckpt.Store, ref: str, *what: Any, **options: Any) -> None:
    Checkpointer(store, run="other").load(ref, *what, **options)


def by_store(store: casckpt.Store, ref: str, model: Any, **options: Any) -> None:
    store.load({"model": model.state_dict()}, ref, **options)


LOADS = pytest.mark.parametrize("load", [by_function, by_checkpointer])
ALL = pytest.mark.parametrize("load", [by_function, by_checkpointer, by_store])


def filled(model: nn.Module) -> int:
    """Return the number of parameters that changed."""
    return sum(bool(one.ne(0).any()) for one in model.parameters())


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)


LLAMA = ["model.embed.w", "model.layers.0.q.w", "model.layers.1.q.w", "model.norm.w", "lm_head.w"]
BERT = ["encoder.layer.0.q.w", "encoder.layer.1.q.w", "pooler.w"]


# where the names occur


@LOADS
@pytest.mark.parametrize("names", [LLAMA, BERT])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layout", ["bare", "nested", "ours"])
def test_a_model_loads_from_every_layout(
    load: Load, names: list[str], strict: bool, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store, run, whole = small(), new_run(), model_of(names, 5)
    state = whole.state_dict()
    if layout == "ours":
        save_model_and_optim_state(store, whole, run=run, step=1)
    else:
        store.save(dict(state) if layout == "bare" else {"model": state, "epoch": 3}, run=run, step=1)
    model = model_of(names)
    load(store, f"{run}@1", model, strict=strict)
    assert filled(model) == len(names)
    assert f"filled {len(names)} of {len(names)} tensors" in caplog.text
    assert warnings(caplog) == ""


@LOADS
def test_top_level_weights_load_next_to_an_optimizer(load: Load) -> None:
    store, whole = small(), model_of(LLAMA, 5)
    groups = [{"params": ["model.norm.w"], "lr": 0.5}]
    store.save({**whole.state_dict(), "optim": {"state": {}, "param_groups": groups}}, step=1)
    model = model_of(LLAMA)
    optimizer = torch.optim.SGD([model.get_parameter("model.norm.w")], lr=0.1)
    load(store, "default@1", model, optimizer)
    assert (filled(model), optimizer.param_groups[0]["lr"]) == (len(LLAMA), 0.5)


@LOADS
def test_the_inner_model_of_an_import_loads(load: Load) -> None:
    store = small()
    store.save(dict(model_of(LLAMA, 5).state_dict()), step=1)
    inner = model_of([name.removeprefix("model.") for name in LLAMA[:-1]])
    load(store, "default@1", inner)
    assert filled(inner) == 4


@LOADS
def test_a_load_logs_the_head_that_the_inner_model_lacks(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    store, run = small(), new_run()
    store.save(dict(model_of(LLAMA, 5).state_dict()), run=run, step=1)
    load(store, f"{run}@1", model_of([name.removeprefix("model.") for name in LLAMA[:-1]]))
    assert f"{run}@1 has 'lm_head.w', which this model lacks: they are skipped" in warnings(caplog)


@LOADS
def test_keys_filled_by_a_rename_are_logged_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, run = small(), new_run()
    store.save({f"net.{name}": torch.ones(2) for name in BERT}, run=run, step=1)
    for _ in range(2):
        load(store, f"{run}@1", model_of(BERT), rename={r"model\.(.*)": r"net.\1"})
    assert caplog.text.count("filled 3 of 3 tensors") == 1


@LOADS
def test_the_error_for_ambiguous_names_explains_how_to_choose(load: Load) -> None:
    store = small()
    store.save({"model": {"w": torch.full((2,), 1.0)}, "w": torch.full((2,), 2.0)}, step=1)
    model = model_of(["w"])
    with pytest.raises(InvalidInput, match="twice") as caught:
        load(store, "default@1", model)
    assert filled(model) == 0
    text = str(caught.value).replace('r"\\1"', '"\\\\1"')
    load(store, "default@1", model, rename=rename_in(text))
    assert model.get_parameter("w").eq(2).all()
    by_store(store, "default@1", model)
    assert model.get_parameter("w").eq(1).all()


@LOADS
def test_top_level_weights_with_different_shapes_are_reported_as_mismatches(load: Load) -> None:
    store = small()
    store.save({name: torch.ones(3) for name in LLAMA}, step=1)
    with pytest.raises(Mismatch, match=r"'model\.model\.norm\.w' has shape \[2\] here, but \[3\]"):
        load(store, "default@1", model_of(LLAMA), strict=False)


# adapters


def adapted(names: Sequence[str], *targets: str) -> list[str]:
    """Return PEFT's names, with adapters at the modules ``targets``."""
    found = []
    for name in names:
        module, _, last = name.rpartition(".")
        inside = f"base_model.model.{module}"
        if module in targets:
            found += [f"{inside}.base_layer.{last}", *(f"{inside}.lora_{one}.default.weight" for one in "AB")]
        else:
            found.append(f"{inside}.{last}")
    return found


PEFT = adapted(LLAMA, "model.layers.0.q")


@LOADS
@pytest.mark.parametrize("layout", ["bare", "ours"])
def test_base_weights_load_into_a_model_with_adapters(
    load: Load, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, run, whole = small(), new_run(), model_of(LLAMA, 5)
    if layout == "ours":
        save_model_and_optim_state(store, whole, run=run, step=1)
    else:
        store.save(dict(whole.state_dict()), run=run, step=1)
    model = model_of(PEFT)
    with pytest.raises(MissingKey, match=r"lora_A.*strict=False"):
        load(store, f"{run}@1", model)
    load(store, f"{run}@1", model, strict=False)
    left = [name for name, one in model.named_parameters() if one.eq(0).all()]
    assert left == [name for name in PEFT if "lora" in name]
    assert f"filled 5 of 7 tensors from {run}@1" in warnings(caplog)


def test_a_plain_load_of_base_weights_suggests_a_rename() -> None:
    store, model = small(), model_of(PEFT)
    save_model_and_optim_state(store, model_of(LLAMA, 5), run="r", step=1)
    with pytest.raises(MissingKey, match="would fill 0 of 7") as caught:
        by_store(store, "r@1", model, strict=False)
    by_store(store, "r@1", model, strict=False, rename=rename_in(str(caught.value)))
    assert filled(model) == 5


@ALL
def test_a_checkpoint_of_only_adapter_weights_loads_into_a_model_with_adapters(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    store, run = small(), new_run()
    adapters = {name: torch.ones(2) for name in PEFT if "lora" in name}
    store.save({"model": adapters}, run=run, step=1)
    model = model_of(PEFT)
    load(store, f"{run}@1", model, strict=False)
    assert filled(model) == 2
    assert f"filled 2 of 7 tensors from {run}@1" in warnings(caplog)


@LOADS
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("names", [PEFT, [name for name in PEFT if "lora" in name], [*LLAMA, "q.lora_A.x.weight"]])
def test_a_model_without_adapters_rejects_adapters(load: Load, strict: bool, names: list[str]) -> None:
    store, model = small(), model_of(LLAMA)
    save_model_and_optim_state(store, model_of(names, 5), run="r", step=1)
    with pytest.raises(Mismatch, match=r"no adapters.*get_peft_model"):
        load(store, "r@1", model, strict=strict)
    assert filled(model) == 0
    load(store, "r@1", model, strict=False, unread="ignore")


def test_a_model_without_adapters_rejects_a_checkpoint_of_only_adapter_keys() -> None:
    store = small()
    save_model_and_optim_state(store, model_of(PEFT, 5), run="r", step=1)
    with pytest.raises(Mismatch, match=r"no adapters.*get_peft_model"):
        by_store(store, "r@1", model_of(LLAMA), strict=False)


# all, some or none


@ALL
@pytest.mark.parametrize(("count", "raises"), [(0, True), (5, True), (280, False), (291, False)])
def test_the_error_for_a_model_with_291_tensors_is_short(
    load: Load, count: int, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"layers.{number}.w" for number in range(291)]
    saved = {name if number < count else f"module.{name}": torch.ones(2) for number, name in enumerate(names)}
    store, run, model = small(), new_run(), model_of(names)
    store.save({"model": saved}, run=run, step=1)
    if raises:
        with pytest.raises(MissingKey, match=f"would fill {count} of 291") as caught:
            load(store, f"{run}@1", model, strict=False)
        assert filled(model) == 0
        load(store, f"{run}@1", model, strict=False, rename=rename_in(str(caught.value)))
        assert filled(model) == 291
        return
    for _ in range(2):
        load(store, f"{run}@1", model, strict=False)
    assert filled(model) == count
    assert warnings(caplog).count(f"filled {count} of 291 tensors from {run}@1") == (count < 291)
    if count < 291:
        load(store, f"{run}@1", model, strict=False, rename=rename_in(warnings(caplog)))
        assert filled(model) == 291


@LOADS
def test_a_load_reports_names_that_only_the_checkpoint_has(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    store, run, model = small(), new_run(), model_of(LLAMA[:-1])
    save_model_and_optim_state(store, model_of(LLAMA, 5), run=run, step=1)
    load(store, f"{run}@1", model, strict=False)
    assert filled(model) == 4
    assert "has 'lm_head.w', which this model lacks" in warnings(caplog)
    load(store, f"{run}@1", model, strict=False, unread="ignore")
    assert warnings(caplog).count("skipped") == 1


@ALL
def test_a_tied_weight_counts_as_filled(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    store, run, model = small(), new_run(), model_of(["emb.w"])
    head = nn.Module()
    head.register_parameter("w", nn.Parameter(model.get_parameter("emb.w").data))
    model.add_module("head", head)
    save_model_and_optim_state(store, model_of(["emb.w"], 5), run=run, step=1)
    load(store, f"{run}@1", model)
    assert (filled(model), warnings(caplog)) == (2, "")


def test_a_load_that_would_leave_a_train_module_empty_raises_an_error() -> None:
    class Module:
        def state_dict_to_save(self) -> Mapping[str, Any]:
            return {"model": {"net.w": torch.ones(2)}}

        def state_dict_to_load(self, metadata: Any) -> dict[str, Any]:
            return {"model": {"w": torch.zeros(2)}}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise AssertionError("nothing was filled")

    store = small()
    Checkpointer(store, run="a").save(1, Module())
    with pytest.raises(MissingKey, match=r"would fill 0 of 1.*rename="):
        Checkpointer(store, run="a").load("a@1", Module(), strict=False)


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1"]), min_size=1, max_size=3).map(lambda parts: ".".join([*parts, "w"])),
    min_size=1, max_size=14, unique=True,
)  # fmt: skip
PREFIX = st.sampled_from(["", "", "model.", "module.", "net.", "base_model.model."])


@pytest.mark.parametrize("load", [by_function, by_store])
@settings(deadline=None)
@given(names=NAMES, prefixes=st.tuples(PREFIX, PREFIX), bare=st.booleans(), data=st.data())
def test_a_load_that_does_not_fill_everything_reports_this(
    load: Load, names: list[str], prefixes: tuple[str, str], bare: bool, data: Any
) -> None:
    """Save any part of a model under one prefix, and load into any part under a different prefix."""
    saved = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    state = {f"{prefixes[0]}{name}": torch.full((2,), float(names.index(name) + 1)) for name in saved}
    store, run, model = small(), new_run(), model_of(f"{prefixes[1]}{name}" for name in wanted)
    store.save(state if bare and load is not by_store else {"model": state}, run=run, step=1)
    try:
        with logged() as said:
            load(store, f"{run}@1", model, strict=False)
    except MissingKey as error:
        assert filled(model) == 0
        before = int(str(error).partition("would fill ")[2].split()[0])
        if "rename={" in str(error):
            load(store, f"{run}@1", model, strict=False, rename=rename_in(str(error)))
            assert filled(model) > before
        else:
            assert before == 0
        return
    except InvalidInput:
        assert filled(model) == 0  # each name occurs twice
        return
    count = filled(model)
    assert count > 0
    if count < len(wanted):
        assert f"filled {count} of {len(wanted)} tensors from {run}@1" in "\n".join(said)


# ranks


STAGES = [[], ["layers.0.w", "layers.1.w"], ["layers.2.w", "norm.w"]]


def load_stages(rank: int, size: int, path: Path) -> list[str]:
    """Load pipeline stages. The first has no parameters."""
    store, found = casckpt.open(path), []
    with logged() as said:
        for ref, load in product(
            ("whole@1", "bare@1", "most@1", "prefixed@1", "tie@1"), (by_function, by_checkpointer)
        ):
            model = model_of(STAGES[rank])
            try:
                load(store, ref, model, strict=False)
                found.append(f"{filled(model)}")
            except CasckptError as error:
                found.append(f"{type(error).__name__} {filled(model)}")
    return [*found, *(line for line in said if "filled" in line)]


def load_stage_by_store(rank: int, size: int, path: Path) -> list[str]:
    """Run a load that fills the whole first stage and part of the second."""
    with logged() as said:
        by_store(casckpt.open(path), "most@1", model_of(STAGES[rank + 1]), strict=False)
    return said


def test_a_load_that_fills_one_pipeline_stage_succeeds_even_if_another_stays_unfilled(
    tmp_path: Path, ranks: Pool
) -> None:
    small_folder(tmp_path).save(
        {"model": dict(model_of([*STAGES[1], "layers.2.w"], 5).state_dict())}, run="most", step=1
    )
    first, second = ranks.run(2, load_stage_by_store, tmp_path)
    assert (first, second) == (["filled 3 of 4 tensors from most@1; left unchanged: 'model.norm.w'."], [])


def test_filled_parameters_are_counted_over_all_pipeline_stages(tmp_path: Path, ranks: Pool) -> None:
    store = small_folder(tmp_path)
    names = [name for stage in STAGES for name in stage]
    weights = dict(model_of(names, 5).state_dict())
    store.save({"model": weights}, run="whole", step=1)
    store.save({f"{name}": value for name, value in weights.items()}, run="bare", step=1)
    store.save({"model": dict(list(weights.items())[:3])}, run="most", step=1)
    store.save({"model": {f"net.{name}": value for name, value in weights.items()}}, run="prefixed", step=1)
    both = {"model": dict(list(weights.items())[:2]), **dict(list(weights.items())[2:])}
    store.save(both, run="tie", step=1)
    first, second, third = ranks.run(3, load_stages, tmp_path)
    told = ["filled 3 of 4 tensors from most@1; left unchanged: 'model.norm.w'."]
    raised = [*["MissingKey 0"] * 2, *["InvalidInput 0"] * 2]
    assert first == [*["0"] * 6, *raised, *told]
    assert second == [*["2"] * 6, *raised]
    assert third == [*["2"] * 4, *["1"] * 2, *raised]


WHOLE = [*(f"layers.{number}.w" for number in range(12)), "norm.w"]


def load_any_stages(rank: int, size: int, path: Path, seed: int, trials: int) -> None:
    """Load part of a model, saved with or without a prefix, into some stages.

    The log must match the filled parameters.
    """
    random, store, said = Random(seed), casckpt.open(path), list[str]()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("casckpt").addHandler(handler)
    logging.getLogger("casckpt").setLevel(logging.INFO)
    for trial in range(trials):
        share, prefix = random.choice([0, 0.5, 0.9, 1]), random.choice(["", "", "m.", "module."])
        bare = random.random() < 0.5
        saved = [name for name in WHOLE if random.random() < share] or ["norm.w"]
        homes = [random.choice([*range(size), None]) for _ in WHOLE]
        load, strict = random.choice([by_function, by_checkpointer, by_store]), random.random() < 0.3
        values = {f"{prefix}{name}": torch.full((2,), WHOLE.index(name) + 1.0) for name in saved}
        ref = f"trial{trial}@1"
        if rank == 0:
            state = values if bare and load is not by_store else {"model": values}
            store.save(state, run=f"trial{trial}", step=1, no_dist=True)
        dist.barrier()
        model = model_of(name for name, home in zip(WHOLE, homes, strict=True) if home == rank)
        said.clear()
        failed = ""
        try:
            load(store, ref, model, strict=strict)
        except CasckptError as error:
            failed = type(error).__name__
        for name, one in model.named_parameters():
            assert one.eq(0).all() or one.eq(WHOLE.index(name) + 1).all()
        told: list[Any] = [None] * size
        dist.all_gather_object(told, (failed, filled(model), len(list(model.parameters()))))
        assert {error for error, *_ in told} == {failed}
        count, total = sum(of_rank[1] for of_rank in told), sum(of_rank[2] for of_rank in told)
        if failed:
            assert count == 0
        elif rank == 0 and count < total:
            assert f"filled {count} of {total} tensors from {ref}" in "\n".join(said)
        elif rank == 0 and total and load is not by_store:
            assert "filled " in "\n".join(said)


@pytest.mark.parametrize("size", [2, 3])
def test_reports_about_random_stages_match_the_filled_tensors(tmp_path: Path, ranks: Pool, size: int) -> None:
    small_folder(tmp_path)
    ranks.run(size, load_any_stages, tmp_path, 7, 10)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
def test_reports_about_many_random_stages_match_the_filled_tensors(
    tmp_path: Path, ranks: Pool, size: int, request: pytest.FixtureRequest
) -> None:
    small_folder(tmp_path)
    seed = request.config.getoption("--hypothesis-seed")
    ranks.run(size, load_any_stages, tmp_path, int(seed or 0), 300)
