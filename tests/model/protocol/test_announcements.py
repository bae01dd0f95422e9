"""Announcements: following a run's log returns the same result as listing all commits."""

from __future__ import annotations

import pytest

from tests.model.protocol.announcements import (
    AS_A_LISTING,
    COMMITTED,
    DECIDED,
    DENSE,
    LATE,
    LATER,
    MUTANTS,
    RACES,
    TOGGLES,
    model,
)
from tests.model.protocol.checks import Setups, check_dies, check_holds

SAFE: Setups = {
    "late commits": {"plans": LATE},
    "given up on": {"plans": LATE[:1], "looks": 3, "revoked": "W"},
    "forgotten and restored": {"plans": TOGGLES},
    "two for one number": {"plans": RACES},
    "answers that are lost": {"plans": LATE, "lost": True, "looks": 1},
    "two in one transaction": {"joined": ("W",), "revoked": "W"},
    "a fresh host": {"plans": LATE, "lists": True},
    "a fresh host, given up on": {"plans": LATE[:1], "revoked": "W", "lists": True},
    "a fresh host, two in one transaction": {"joined": ("W",), "lists": True},
    "a fresh host, forgotten and restored": {"plans": TOGGLES, "lists": True},
    "who announces dies": {"plans": (*LATE[:1], *TOGGLES), "quiet": True},
}
LARGE: Setups = {
    "a fresh host, all at once": {"plans": (*LATE[:1], *TOGGLES), "revoked": "W", "lists": True},
    "late commits, three looks": {"plans": (*LATE, (("B", COMMITTED),)), "looks": 3},
    "all at once": {"plans": (*LATE[:1], *RACES), "looks": 2, "revoked": "W"},
    "answers that are lost": {"plans": (*LATE[:1], *TOGGLES), "lost": True, "looks": 2},
}
DIES = {
    "announced_after": ("late commits", AS_A_LISTING),
    "txid_cursor": ("late commits", AS_A_LISTING),
    "not_numbered": ("forgotten and restored", AS_A_LISTING),
    "reads_once": ("late commits", AS_A_LISTING),
    "logs_first": ("late commits", AS_A_LISTING),
    "forgets_undecided": ("late commits", AS_A_LISTING),
    "skips_number": ("answers that are lost", DENSE),
    "joins_silently": ("two in one transaction", AS_A_LISTING),
    "purges_silently": ("two for one number", AS_A_LISTING),
    "announces_once": ("two for one number", AS_A_LISTING),
    "stops_at_undecided": ("late commits", AS_A_LISTING),
    "lists_commits_first": ("a fresh host", LATER),
    "lists_commits_only": ("a fresh host", LATER),
    "lists_first": ("a fresh host", LATER),
    "nobody_settles": ("who announces dies", DECIDED),
}


@pytest.mark.parametrize("setup", SAFE)
def test_a_read_shows_every_announced_record(setup: str) -> None:
    check_holds(model(**SAFE[setup]), ("creates runs/1", "creates commits"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_a_read_shows_every_announced_record_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), ("creates runs/1", "creates commits"), limit=6_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_omission_from_the_protocol_loses_an_announced_record(mutant: str) -> None:
    setup, broken = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), broken.says)
