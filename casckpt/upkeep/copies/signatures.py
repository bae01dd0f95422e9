"""Signatures of checkpoints: small objects beside them, by the id of the checkpoint and that of the key.

A copy takes them along, before its commit. Nothing here makes or checks one, and no gc deletes one.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import suppress

from casckpt.errors import Damaged, NotFound, Refused
from casckpt.format.keys import parse_signature
from casckpt.format.names import ManifestId
from casckpt.format.records import MAX_RECORD_BYTES
from casckpt.repository.repository import Repository
from casckpt.storage.base import AlreadyExists

PREFIX = "signatures/"

log = logging.getLogger(__name__)


def copy_signatures(source: Repository, target: Repository, ids: Container[ManifestId]) -> None:
    """Put the signatures of ``ids`` into ``target`` that it lacks. One LIST where there are none.

    One that cannot be read keeps nothing else from being copied. Raises `StorageError`.
    """
    here = [key for key, id in _listed(source).items() if id in ids]
    there = _listed(target) if here else {}
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


def _listed(repo: Repository) -> dict[str, ManifestId]:
    listed = repo.storage.list(PREFIX, known=parse_signature)
    return {entry.key: id for entry in listed if (id := parse_signature(entry.key)) is not None}
