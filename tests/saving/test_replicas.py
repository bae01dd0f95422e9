"""Values that several ranks hold in full. Each save compares them, and never mixes different values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Replicate

import casckpt
from casckpt.contents import manifests
from casckpt.errors import InvalidInput
from casckpt.format import plain
from casckpt.format.sections.index import REPLICAS_NOTE
from casckpt.frontends import megatron
from casckpt.frontends.dcp import StorageWriter
from casckpt.frontends.trainer import Checkpointer
from casckpt.saving import replicas
from casckpt.saving.replicas import relative_difference
from casckpt.store.store import Store
from casckpt.tensors.memory import sampled
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import CELL
from tests.support.together import line, numbers, spread, visible, watched


class Heard(logging.Handler):
    """Collects the warnings of a job."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("casckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return the warnings since the last call."""
        found, self.texts = self.texts, []
        return found


def noted(store: Store, ref: str) -> list[str]:
    """Return the keys that a checkpoint records as differing."""
    note = manifests.get(store.repository, store.get(ref).commit).body.notes.get(REPLICAS_NOTE)
    return [] if note is None else list(plain.decode(note))


# refused saves


class Experts(nn.Module):
    """A layer that is equal on all ranks, and a layer that differs on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(40, 40), nn.Linear(64, 64)
        with torch.no_grad():
            for name, one in self.named_parameters():
                one.copy_(numbers(name if "shared" in name else f"{name} of {rank}", *one.shape))


def save_experts(rank: int, size: int, path: Path, way: str) -> Any:
    store, model = casckpt.open(path), Experts(rank)
    stored: dict[str, Any] = {"w": megatron.ShardedTensor.from_rank_offsets("w", model.expert.weight, replica_id=rank)}
    ways: dict[str, Callable[[], Any]] = {
        "tensors": lambda: store.save({"model": model.state_dict()}, run="a", step=1),
        "parameters": lambda: store.save({"model": dict(model.named_parameters())}, run="a", step=1),
        "replicated DTensors": lambda: store.save(
            {"model": spread({"expert": model.expert.weight.detach()}, line(size))}, run="a", step=1
        ),
        "model": lambda: casckpt.save_model_and_optim_state(store, model, run="a", step=1),
        "checkpointer": lambda: Checkpointer(store, run="a").save(1, model),
        "background": lambda: store.save_async({"model": model.state_dict()}, run="a", step=1).result(),
        "dcp": lambda: dcp_save({"expert": model.expert.weight}, storage_writer=StorageWriter(store, run="a", step=1)),
        "megatron": lambda: megatron.save(stored, f"{path}#a@1"),
        "fully parallel": lambda: megatron.save(stored, f"{path}#a@1", fully_parallel=True),
    }
    return [text_of(ways[way]) for _ in range(2)]  # a refused parameter is not accepted later


def text_of(call: Callable[[], Any]) -> str:
    """Return the error of the call, with its causes. DCP's error is not an Exception."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return str(error)
    return "nothing"


WAYS = ["tensors", "parameters", "model", "checkpointer", "background", "replicated DTensors", "dcp", "megatron"]


@pytest.mark.parametrize(
    ("way", "size"), [*((way, 2) for way in (*WAYS, "fully parallel")), ("parameters", 4), ("background", 4)]
)
def test_a_parameter_that_differs_on_each_rank_is_rejected_on_all_ranks(
    ranks: Pool, path: Path, way: str, size: int
) -> None:
    key = "'w'" if way in ("megatron", "fully parallel") else "expert"
    for texts in ranks.run(size, save_experts, path, way):
        for text in texts:
            assert "differs between ranks 0 and" in text
            assert key in text
            assert "shared" not in text
            assert "relative difference" in text
            assert "check_replicas='off'" in text
    assert visible(path) == []


def save_with_other_words(rank: int, size: int, path: Path) -> Any:
    check: Any = ("sample", "off")[rank]
    return outcome_of(lambda: casckpt.open(path).save({"x": torch.ones(3)}, step=1, check_replicas=check))


def test_ranks_with_different_check_replicas_are_rejected(ranks: Pool, path: Path) -> None:
    for error in ranks.run(2, save_with_other_words, path):
        assert isinstance(error, InvalidInput)
        assert "check_replicas='off'" in str(error)


def save_one_other_element(rank: int, size: int, path: Path) -> Any:
    store, storage = watched(path)
    data = nn.Parameter(numbers("w", 40_000), requires_grad=False)
    data[31_234] += rank
    errors = [text_of(lambda: store.save({"w": data}, run="native", step=1, check_replicas="raise"))]
    writer = StorageWriter(store, run="dcp", step=1, check_replicas="raise")
    written = storage.blob_bytes
    errors.append(text_of(lambda: dcp_save({"w": data}, storage_writer=writer)))
    word: Any = ("sample", "off")[rank]
    writer = StorageWriter(store, run="dcp", step=2, check_replicas=word)
    return errors, written, text_of(lambda: dcp_save({"w": data}, storage_writer=writer))


def test_check_replicas_raise_rejects_any_difference_before_writing(ranks: Pool, path: Path) -> None:
    for errors, written, other_words in ranks.run(2, save_one_other_element, path):
        assert all("'w' differs between ranks 0 and 1" in error for error in errors)
        assert all("check_replicas='sample'" in error for error in errors)
        assert written == 0
        assert "check_replicas is 'sample' on some ranks only" in other_words
    assert visible(path) == []


# accepted saves


def drifting(rank: int, size: int, path: Path, saves: int) -> Any:
    """Norms that no rank synchronizes. Each step adds its own rounding."""
    store, heard = casckpt.open(path), Heard()
    norm, weight = nn.Parameter(torch.ones(2000)), nn.Parameter(numbers("w", 64, 100))
    state = {"norm": norm, "weight": weight, "step": torch.tensor(rank), "loss": 0.5 + rank}
    told = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(saves):
        store.save(state, run="a", step=step)
        told.append(heard.taken())
        with torch.no_grad():
            norm.mul_(1 + 1e-5 * torch.randn(2000, generator=generator))
            weight.add_(0.125)
    store.save(state, run="a", step=saves)
    found = store.read(f"a@{saves}")
    return told, torch.equal(found["norm"], norm), torch.equal(found["weight"], weight), noted(store, f"a@{saves}")


def test_a_run_with_drifting_replicas_continues_with_one_warning(ranks: Pool, path: Path, full: bool) -> None:
    saves = 200 if full else 6
    found = ranks.run(2, drifting, path, saves)
    first, second, *later = found[0][0]
    assert [("'step'" in text, "'loss'" in text, "'norm'" in text) for text in first] == [(True, True, False)]
    assert [("'step'" in text, "'norm'" in text, "'weight'" in text) for text in second] == [(False, True, False)]
    assert later == [[]] * (saves - 2)
    assert found[1][0] == [[]] * saves
    assert [one[1:3] for one in found] == [(True, True), (False, True)]  # all of them are rank 0's values
    assert found[0][3] == ["loss", "norm", "step"]


def diverging(rank: int, size: int, path: Path) -> Any:
    """The values are equal in the first save. In the second, they differ, with a new handle and a new group."""
    state = {"w": nn.Parameter(numbers("w", 3000))}
    casckpt.open(path).save(state, run="a", step=1)
    if rank:
        state["w"].data.copy_(numbers("other", 3000))
    casckpt.open(path).save_async(state, run="b", step=2).result()
    return noted(casckpt.open(path), "b@2")


def test_replicas_that_this_process_saved_before_are_never_rejected(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, diverging, path) == [["w"], ["w"]]
    assert torch.equal(casckpt.open(path).read("b@2")["w"], numbers("w", 3000))


def failing_after_it_was_accepted(rank: int, size: int, path: Path) -> Any:
    store, heard = casckpt.open(path), Heard()
    state = {"w": nn.Parameter(numbers("w", 3000) + rank * 1e-4)}

    def broken(done: int, total: int | None) -> None:
        if rank:
            raise InvalidInput("as it happens")

    error = outcome_of(lambda: store.save(state, run="a", step=1, progress=broken))
    silent = heard.taken()
    store.save(state, run="a", step=1)
    return str(error), silent, heard.taken(), noted(store, "a@1")


def test_a_difference_is_reported_by_the_first_save_that_stores_it(ranks: Pool, path: Path) -> None:
    (error, silent, told, keys), _ = ranks.run(2, failing_after_it_was_accepted, path)
    assert "as it happens" in error
    assert silent == []
    assert ["'w'" in text for text in told] == [True]
    assert keys == ["w"]


def drifted_elsewhere(rank: int, size: int, path: Path) -> list[tuple[list[str], int]]:
    """The values are equal, and then drift twice, through DCP and Megatron, with new writers for each save."""
    found, heard = [], Heard()
    for run in ("dcp", "megatron"):
        for step in range(3):
            data = {"w": numbers("w", 50, 40) + (1e-4 * rank if step else 0), "v": torch.ones(3)}
            if run == "dcp":
                dcp_save(data, storage_writer=StorageWriter(path, run=run, step=step))
            else:
                parts = {
                    key: megatron.ShardedTensor.from_rank_offsets(f"m.{key}", value, replica_id=rank)
                    for key, value in data.items()
                }
                megatron.save(parts, f"{path}#{run}@{step}")
            found.append((noted(casckpt.open(path), f"{run}@{step}"), len(heard.taken())))
    return found


def test_dcp_and_megatron_report_drifted_keys(ranks: Pool, path: Path) -> None:
    first, second = ranks.run(2, drifted_elsewhere, path)
    noted_keys = [[], ["w"], ["w"], [], ["m.w"], ["m.w"]]
    assert first == list(zip(noted_keys, [0, 1, 0, 0, 1, 0], strict=True))
    assert second == [(keys, 0) for keys in noted_keys]


def counted(rank: int, size: int, path: Path) -> tuple[int, int]:
    """Return how many tensors a save samples among parameters, numbers and per-rank values."""
    store = casckpt.open(path)
    state: dict[str, Any] = {f"w{i}": nn.Parameter(torch.ones(20)) for i in range(10)} | {f"only {rank}": torch.ones(5)}
    state |= {f"step{i}": torch.tensor(3.0) for i in range(10)}
    counts = []
    for step in range(2):
        with patch.object(replicas, "sampled", wraps=sampled) as calls:
            store.save(state, run="a", step=step)
        counts.append(sum(len(call.args[0]) for call in calls.call_args_list))
    return counts[0], counts[1]


def test_only_replicas_are_sampled_again(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, counted, path) == [(21, 20)] * 2


# rereads


def one_element(rank: int, size: int, path: Path, who: int, where: int) -> Any:
    store, heard = casckpt.open(path), Heard()
    weight = nn.Parameter(numbers("w", 150 * CELL // 4))
    if rank == who:
        weight.data[where] += 1e-3
    state = {"w": weight, "other": nn.Parameter(torch.ones(9))}
    for step in range(64 * (size - 1)):
        store.save(state, run="a", step=100 * step)
        if noted(store, f"a@{100 * step}"):
            break
    store.save(state, run="a", step=10**6)
    return noted(store, f"a@{100 * step}"), torch.equal(store.read(f"a@{10**6}")["w"], weight), heard.taken()


@pytest.mark.parametrize(("size", "who", "where"), [(2, 0, 0), (2, 1, 150 * CELL // 4 - 1), (3, 1, 10_000)])
def test_a_changed_element_is_found_within_64_saves_per_holder(
    ranks: Pool, path: Path, size: int, who: int, where: int
) -> None:
    found = ranks.run(size, one_element, path, who, where)
    assert [one[0] for one in found] == [["w"]] * size
    # all of them are rank 0's values
    assert [one[1] for one in found] == [(rank == who) == (who == 0) for rank in range(size)]
    assert [["'w'" in text for text in one[2]] for one in found] == [[True], *[[]] * (size - 1)]


# the size of a difference


def small(rank: int, size: int, path: Path) -> list[str]:
    """These are short vectors whose last element differs. The reported difference is over all their elements."""
    found = []
    for count in (2, 5, 15, 16):
        data = torch.ones(count)
        data[-1] = 1.5 + rank
        error = outcome_of(lambda: casckpt.open(path).save({"w": nn.Parameter(data)}, step=1))  # noqa: B023
        found.append(str(error).partition("relative difference ")[2].partition(")")[0])
    return found


def test_all_elements_of_small_tensors_are_compared(ranks: Pool, path: Path) -> None:
    expected = [f"{1 / (count - 1 + 2.5**2) ** 0.5:.3g}" for count in (2, 5, 15, 16)]
    assert ranks.run(2, small, path) == [expected] * 2


def test_a_difference_is_relative_to_the_larger_norm() -> None:
    a = torch.tensor([3.0, 4.0])
    for kind, other, ratio in ((torch.float32, a * 1.5, 1 / 3), (torch.bfloat16, a * 2, 0.5), (torch.float64, -a, 2.0)):
        one, two = (bytes(x.to(kind).view(torch.uint8).numpy()) for x in (a, other))
        found = relative_difference(str(kind).removeprefix("torch."), one, two)
        assert found == pytest.approx(ratio)
        assert found == pytest.approx(relative_difference(str(kind).removeprefix("torch."), two, one))
        assert relative_difference(str(kind).removeprefix("torch."), one, one) == 0


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), 1.0),
        (torch.tensor([torch.inf, 3.0]), torch.tensor([torch.inf, 4.0]), 0.25),
        (torch.tensor([torch.nan, 3.0]), torch.tensor([torch.nan, 3.0]), 0.0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0),
        (torch.tensor([3e200, 4e200], dtype=torch.float64), torch.tensor([0.0, 0.0], dtype=torch.float64), 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 0j]), 0.8),
    ],
)
def test_non_finite_values_count_as_completely_different(one: torch.Tensor, other: torch.Tensor, ratio: float) -> None:
    dtype = str(one.dtype).removeprefix("torch.")
    data = [bytes(x.view(torch.uint8).numpy()) for x in (one, other)]
    assert relative_difference(dtype, *data) == pytest.approx(ratio)


def test_a_dtensor_that_drifted_is_saved_from_one_rank(ranks: Pool, path: Path) -> None:
    assert ranks.run(2, drifted_dtensor, path) == [True, False]


def drifted_dtensor(rank: int, size: int, path: Path) -> bool:
    full = numbers("w", 100, 90) + 1e-4 * rank
    store = casckpt.open(path)
    store.save(spread({"w": full}, line(size), [Replicate()]), run="a", step=1)
    return torch.equal(store.read("a@1")["w"], full)
