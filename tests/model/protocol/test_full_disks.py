"""A full disk loses no object of a committed checkpoint, and shows no half record."""

from __future__ import annotations

from functools import partial

import pytest

from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.full_disks import MUTANTS, RECORDS, WHOLE, prepared, removal

REMOVALS: Setups = {
    "revoked": {"gcs": 2},
    "full": {"full": True},
    "a copy": {"copy": True},
    "a copy, full": {"copy": True, "full": True},
}
PREPARED: Setups = {
    "two processes": {},
    "killed after a link": {"linked": True},
}
DIES = {
    "deletes_after_try": "full",
    "deletes_copy": "a copy, full",
    "unread_revoke": "revoked",
    "takes_no_name": "two processes",
    "writes_second_name": "killed after a link",
    "trusts_count": "killed after a link",
    "prepares_in_place": "two processes",
    "names_first": "two processes",
}
ALL = {**{name: partial(removal, **given) for name, given in REMOVALS.items()},
       **{name: partial(prepared, **given) for name, given in PREPARED.items()}}  # fmt: skip


@pytest.mark.parametrize("name", REMOVALS)
def test_a_failed_save_removes_nothing_that_a_checkpoint_needs(name: str) -> None:
    happens = ("DELETES objects/blob", "creates commits/S = committed")
    check_holds(ALL[name](), happens)


@pytest.mark.parametrize("name", PREPARED)
def test_processes_that_take_the_same_prepared_file_write_whole_records(name: str) -> None:
    linked = name == "killed after a link"
    check_holds(ALL[name](), () if linked else ("writes A to old", "writes B to new", "dies"))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_breaks_an_invariant(mutant: str) -> None:
    name = DIES[mutant]
    check_dies(ALL[name](mutant=mutant), (WHOLE if name in REMOVALS else RECORDS).says)
