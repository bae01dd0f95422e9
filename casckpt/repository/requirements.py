"""Requirements that the settings impose on writers.

A version that does not know a requirement reads but does not write. A writer checks the requirements after its
transaction has begun. Therefore, a process that sets a requirement has to wait only for the transactions that are open
at that time. The check costs one LIST; each host reads the record once.
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
    """Return the settings. Raises `Unsupported` if they contain a requirement that this version does not know.

    Raises `StorageError`, and `Damaged` or `Refused` if the settings cannot be read.
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
