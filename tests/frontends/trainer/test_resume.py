"""A real training loop on several ranks is killed at random moments and resumes exactly, even on a different number of
ranks."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

from tests.support.looping import Diary, Plan, expected_samples, train_on
from tests.support.ranks import Pool
from tests.support.saves import small_folder

STEPS, MORE, EVERY, SIZE = 8, 4, 4, 4
KILLS = 1  # 20 with --full
RISKS = (None, EVERY, EVERY, EVERY + 1)  # max_steps_at_risk: None means two intervals
NOTICED = 5.0  # seconds until torch's collectives fail after a rank has died


def attempts(ranks: Pool, size: int, plan: Plan, draw: random.Random, *, kills: int, seconds: float) -> list[Plan]:
    """Restart the training until ``kills`` random kills have hit it, then train to the end. Return all runs.

    Most kills hit all ranks. If a kill hits a single rank, the others fail because of torch's timeout.
    """
    runs, hits = [plan], 0
    while True:
        victim = draw.randrange(size) if kills > KILLS and draw.random() < 0.2 else None
        moment = None if hits == kills else draw.uniform(0.05, seconds)
        background, at_risk = draw.random() < 0.8, draw.choice(RISKS)
        one = replace(runs[-1], seconds=moment, victim=victim, background=background, at_risk=at_risk)
        outcomes = ranks.outcomes(size, train_on, one, timeout=60 if victim is None else NOTICED)
        if any(outcome.died is not None for outcome in outcomes):
            hits += 1
            continue
        assert all(outcome.ok for outcome in outcomes) or victim is not None, outcomes
        if moment is None:
            return runs
        runs.append(replace(plan, run=f"{plan.run}-{len(runs)}"))  # the run ended before the kill


def check(runs: list[Plan], size: int, whole: Diary, first: int = 0) -> None:
    for number, run in enumerate(runs):
        diary = Diary.read(run, size)
        assert all(diary.losses[step] == whole.losses[step] for step in diary.losses)
        assert all(diary.samples[step] <= whole.samples[step] for step in diary.samples)
        assert all(lost <= most for lost, most in diary.lost)
        assert set(diary.losses) == set(range(first + 1, run.steps + 1)), (number, len(runs))


def test_training_that_is_killed_at_random_moments_resumes_exactly(
    tmp_path: Path, ranks: Pool, seed: int, full: bool
) -> None:
    draw = random.Random(seed)
    calm = Plan(tmp_path, "calm", STEPS, EVERY)
    ranks.run(SIZE, train_on, replace(calm, run="warm", steps=1))
    begun = time.monotonic()
    ranks.run(SIZE, train_on, calm)
    seconds = time.monotonic() - begun
    whole = Diary.read(calm, SIZE)
    assert all(len(losses) == 1 for losses in whole.losses.values())
    assert whole.samples == expected_samples(STEPS, SIZE)
    runs = attempts(ranks, SIZE, replace(calm, run="killed"), draw, kills=20 if full else KILLS, seconds=seconds)
    check(runs, SIZE, whole)
    store = small_folder(tmp_path / "store")
    assert {ckpt.step for ckpt in store.checkpoints("killed")} == {STEPS - EVERY, STEPS}
    assert not store.verify().is_damaged
    store.gc(wait=0)
    assert not list(store.repository.storage.list("transactions/"))  # killed saves leave nothing behind

    for size in (2, 3) if full else (3,):
        base = f"calm@{STEPS - EVERY}"
        undisturbed = Plan(tmp_path, f"calm{size}", STEPS + MORE, EVERY, base=base)
        ranks.run(size, train_on, undisturbed)
        there = Diary.read(undisturbed, size)
        order = expected_samples(STEPS + MORE, size)
        assert there.samples == {step: order[step] for step in range(STEPS - EVERY + 1, STEPS + MORE + 1)}
        runs = attempts(ranks, size, replace(undisturbed, run=f"killed{size}"), draw, kills=1, seconds=seconds / 2)
        check(runs, size, there, first=STEPS - EVERY)
