"""What the settings demand of whoever writes: one that does not know it refuses, and readers read on.

A writer asks once its transaction has begun, so that who sets a demand need only wait for the transactions that are
open then. It costs a LIST; the record is read once by a process and its host.
"""

from __future__ import annotations

from casckpt.errors import CasckptError
from casckpt.format import records
from casckpt.format.keys import parse_settings
from casckpt.format.records import Settings
from casckpt.repository.reading import read_records
from casckpt.repository.repository import Repository

PREFIX = "settings/"


def check_requirements(repo: Repository) -> Settings:
    """Return the settings; raise `Unsupported` if whoever writes to the store must know what this version does not.

    Raises `Damaged` or `Refused` if the settings cannot be read, `StorageError`.
    """
    listed = repo.storage.list(PREFIX, known=parse_settings)
    numbers = {number: entry for entry in listed if (number := parse_settings(entry.key)) is not None}
    if not numbers:
        return Settings(created_at=0)
    newest = numbers[max(numbers)]
    found = read_records(repo, PREFIX, [newest], lambda _: Settings)[newest.key]
    settings = repo.settings if isinstance(found, CasckptError) else found
    records.check_requirements(settings, repo.storage.url)
    return settings
