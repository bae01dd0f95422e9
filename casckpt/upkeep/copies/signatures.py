"""Copies signatures. A copy uploads all signatures before its commit, even invalid ones."""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import suppress

from casckpt.contents.signatures import list_signatures
from casckpt.errors import Damaged, NotFound, Refused
from casckpt.format.names import ManifestId
from casckpt.format.records import MAX_RECORD_BYTES
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists

log = logging.getLogger(__name__)


def copy_signatures(source: Repository, target: Repository, ids: Container[ManifestId]) -> None:
    """Upload the missing signatures of ``ids`` to ``target``. Makes one LIST if there are none.

    Logs and skips a signature that cannot be read. Raises `StorageError`.
    """
    here = [key for key, id in list_signatures(source).items() if id in ids]
    there = list_signatures(target) if here else {}
    for key in here:
        if key in there:
            continue
        try:
            data = source.storage.get(key, limit=MAX_RECORD_BYTES)
        except (NotFound, Damaged, Refused) as error:
            log.warning("%s of %s was not copied: %s", key, source.storage.url, error)
            continue
        with suppress(AlreadyExists):
            target.storage.put(key, data)
