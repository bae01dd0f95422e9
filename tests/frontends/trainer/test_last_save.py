"""After a signal, all ranks save once more."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer, SaveOnSignal
from casckpt.ranks.ranks import warn_of_torchrun
from casckpt.repository.repository import Repository
from casckpt.storage.local.store import LocalStore
from casckpt.store.store import Store
from tests.support.faulty import FaultyStore, fail_before
from tests.support.forks import forked
from tests.support.ranks import Pool, outcome_of
from tests.support.saves import copied, small, small_folder, steps


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def stopped_by_a_signal(rank: int, size: int, path: Path, saved_before: bool) -> Any:
    checkpointer = Checkpointer(small_folder(path), run="sft")
    made = []
    try:
        with SaveOnSignal(checkpointer) as last:
            for step in range(1, 100):
                if step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)  # a second signal
                made.append(step)
                if saved_before:
                    checkpointer.save_async(step, model(), None, {"step": step})
                last.check(step, model(), None, {"step": step}, metadata={"why": "signal"})
    except SystemExit as left:
        handler = signal.getsignal(signal.SIGTERM)
        return made[-1], left.code, [step for _, step in steps(checkpointer.store)], handler == signal.SIG_DFL
    return None


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_signal_to_one_rank_makes_all_ranks_save_once_and_exit(
    store_path: Path, ranks: Pool, saved_before: bool
) -> None:
    found = ranks.run(3, stopped_by_a_signal, store_path, saved_before)
    there = [1, 2, 3] if saved_before else [3]
    assert found == [(3, 128 + signal.SIGTERM, there, True)] * 3


def test_the_option_every_sets_the_steps_at_which_ranks_exchange_signals(store: Store) -> None:
    checkpointer = Checkpointer(store, run="sft")
    with SaveOnSignal(checkpointer, [signal.SIGUSR1], every=5, exit_status=0) as last:
        os.kill(os.getpid(), signal.SIGUSR1)
        for step in range(1, 5):
            last.check(step, model())
        with pytest.raises(SystemExit) as left:
            last.check(5, model())
    assert left.value.code == 0
    assert checkpointer.latest_checkpoint().step == 5
    with pytest.raises(InvalidInput, match="every=0"):
        SaveOnSignal(checkpointer, every=0)


def test_a_copy_catches_signals_once_it_is_entered(store: Store) -> None:
    with SaveOnSignal(Checkpointer(store, run="sft"), [signal.SIGUSR1], exit_status=7) as last:
        signal.raise_signal(signal.SIGUSR1)
        copies = copied(last)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    for step, other in enumerate(copies, 1):
        other.check(step, model())
        with other:
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(SystemExit) as left:
                other.check(step, model())
        assert (left.value.code, steps(store)[-1]) == (7, ("sft", step))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def children_of_blocks(rank: int, size: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    outer, inner = (SaveOnSignal(Checkpointer(small(), run="sft")) for _ in range(2))

    def look() -> None:
        assert signal.getsignal(signal.SIGTERM) == before
        inner.__exit__(None, None, None)  # the child leaves the block, too
        assert signal.getsignal(signal.SIGTERM) == before

    with outer:
        caught = signal.getsignal(signal.SIGTERM)
        with inner, forked(look):
            pass
        assert signal.getsignal(signal.SIGTERM) == caught != before
    with forked(look):
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_child_that_a_rank_forks_has_the_handlers_from_before(ranks: Pool) -> None:
    """`multiprocessing` ends its daemons with SIGTERM, and waits for them, even if they no longer run Python code."""
    ranks.run(2, children_of_blocks)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1"}


@pytest.mark.parametrize(
    ("env", "signals", "warns"),
    [
        (TORCHRUN, [signal.SIGUSR1], True),
        ({}, [signal.SIGUSR1], False),
        (TORCHRUN | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, [signal.SIGUSR1], False),
        (TORCHRUN, [], False),
    ],
)
def test_under_torchrun_the_time_for_the_last_save_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, env: dict[str, str],
    signals: list[signal.Signals], warns: bool,
) -> None:  # fmt: skip
    for name in (*TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    warn_of_torchrun.cache_clear()
    for _ in range(2):
        with SaveOnSignal(Checkpointer(small(), run="sft"), signals):
            pass
    warn_of_torchrun.cache_clear()
    assert ["30 s later" in one.message for one in caplog.records] == [True] * warns


def test_signals_are_handled_only_in_the_main_thread(store: Store) -> None:
    found: list[Any] = []

    def enter() -> None:
        found.append(outcome_of(lambda: SaveOnSignal(Checkpointer(store, run="sft")).__enter__()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert isinstance(found[0], InvalidInput)


def test_a_signal_that_cannot_be_handled_restores_the_other_handlers(store: Store) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InvalidInput, match="SIGKILL"):
        SaveOnSignal(Checkpointer(store, run="sft"), [signal.SIGUSR1, signal.SIGKILL]).__enter__()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("how", ["save", "save_async", "save_if_due"])
def test_a_signal_after_the_save_of_a_step_exits_even_if_the_state_has_changed_since(store: Store, how: str) -> None:
    net, checkpointer = model(), Checkpointer(store, run="sft", save_interval=1)
    with SaveOnSignal(checkpointer, [signal.SIGUSR1]) as last:
        getattr(checkpointer, how)(1, net)
        torch.nn.init.zeros_(net.weight)  # for example, because the loop sets the averaged weights after a save
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            last.check(1, net)
    assert steps(store) == [("sft", 1)]


def test_a_failed_save_is_repeated_before_the_exit(store_path: Path) -> None:
    storage = FaultyStore(LocalStore(store_path), [fail_before("put", key="objects/*.manifest")])
    checkpointer = Checkpointer(Store(Repository(storage)), run="sft")
    with SaveOnSignal(checkpointer, [signal.SIGUSR1]) as last:
        checkpointer.save_async(1, model())
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            last.check(1, model())
    assert checkpointer.latest_checkpoint().step == 1
