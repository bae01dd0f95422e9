"""The bytes of rewrites: gc never deletes what places need that exist, and in the end deletes everything else."""

from __future__ import annotations

import pytest

from tests.model.protocol.blobs import FITS, MUTANTS, PURGED_FORGOTTEN, TIDY, WHOLE, Turn, model
from tests.model.protocol.checks import Setups, check_dies, check_holds
from tests.model.protocol.places import FORGOTTEN, PURGED, RESTORED, TRIMMED, Back

TWO = (Turn(1), Turn(1))
TO_THE_END = (Turn(1, last=2),)
SAFE: Setups = {
    "a save, trimmed": {"saves": 1, "users": ((TRIMMED,),)},
    "a save, undone and trimmed": {"saves": 1, "users": ((Back, TRIMMED),)},
    "two gcs, forgotten": {"users": ((FORGOTTEN,),), "gcs": TWO},
    "answers that are lost": {"lost": True, "gcs": TWO},
    "killed": {"mortal": True, "users": ((FORGOTTEN, RESTORED),), "gcs": TO_THE_END},
    "folders with guards": {"guards": True, "mortal": True, "users": ((TRIMMED,),), "gcs": TO_THE_END},
    "slots that cannot be read": {"unreadable": True, "mortal": True, "users": ((FORGOTTEN,),), "gcs": TO_THE_END},
    "two fuller copies": {"rewrites": ("adds", "adds")},
    "a fuller copy, two users": {"rewrites": ("adds",), "users": ((FORGOTTEN, PURGED), (RESTORED,))},
    "with a blob of another": {"rewrites": ("names",), "other": (FORGOTTEN, PURGED)},
    "two that copy, purged": {"copies": 2, "rewrites": (), "users": ((FORGOTTEN, PURGED),)},
    "a gc that resumes, purged": {"saves": 1, "users": ((FORGOTTEN, PURGED),), "resumes": True, "reads": True},
    "a gc that resumes, trimmed": {"saves": 1, "users": ((Back, TRIMMED),), "resumes": True, "reads": True},
}
LARGE: Setups = {
    "a save, purged": {"begun": True, "users": ((FORGOTTEN, PURGED),)},
    "a save, trimmed, two gcs": {"begun": True, "users": ((TRIMMED,),), "gcs": TWO},
    "a save, purged, a gc that resumes": {"saves": 2, "users": ((FORGOTTEN, PURGED),), "resumes": True, "reads": True},
    "two rewrites, forgotten": {"rewrites": ("moves", "adds"), "users": ((FORGOTTEN, RESTORED),)},
    "two that copy, trimmed": {"copies": 2, "users": ((TRIMMED,),), "mortal": True, "gcs": TO_THE_END},
    "two saves, trimmed": {"saves": 2, "users": ((TRIMMED,),)},
    "a save, answers that are lost": {"saves": 1, "users": ((TRIMMED,),), "lost": True},
    "a save, folders with guards": {"saves": 1, "guards": True, "users": ((TRIMMED,),), "gcs": TO_THE_END},
}
DIES = {
    "save_reads_first": ("a save, trimmed", WHOLE),
    "rewrite_reads_first": ("with a blob of another", WHOLE),
    "rows_of_checkpoint": ("a save, trimmed", WHOLE),
    "joins_late": ("two that copy, purged", WHOLE),
    "own_names": ("two that copy, purged", FITS),
    "no_wait": ("a save, trimmed", WHOLE),
    "open_first": ("a save, trimmed", WHOLE),
    "roots_live": ("a gc that resumes, purged", WHOLE),
    "own_key": ("a save, trimmed", WHOLE),
    "own_first": ("two gcs, forgotten", WHOLE),
    "own_always": ("two gcs, forgotten", WHOLE),
    "gone_is_revoked": ("two gcs, forgotten", WHOLE),
    "unread_slot": ("slots that cannot be read", WHOLE),
    "gives_up": ("answers that are lost", WHOLE),
    "file_first": ("killed", TIDY),
    "slot_is_enough": ("killed", TIDY),
    "later_number": ("a fuller copy, two users", PURGED_FORGOTTEN),
    "unread_root": ("a gc that resumes, purged", WHOLE),
    "guard_by_checkpoint": ("folders with guards", TIDY),
}


@pytest.mark.parametrize("setup", SAFE)
def test_no_blob_that_places_need_is_deleted(setup: str) -> None:
    check_holds(model(**SAFE[setup]), (" DELETES objects",))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", LARGE)
def test_no_blob_that_places_need_is_deleted_in_larger_models(setup: str) -> None:
    check_holds(model(**LARGE[setup]), (" DELETES objects/T",), limit=8_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_loses_data_or_leaves_something(mutant: str) -> None:
    setup, broken = DIES[mutant]
    check_dies(model(mutant, **SAFE[setup]), broken.says)
