"""Checkpoint signatures.

A detached signature signs a domain string and the id, which covers everything that was saved.

docs/integrity.md lists what a signature does not cover: the location of the bytes, other records about a checkpoint,
and which checkpoint a name or "latest" refers to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casckpt.contents import manifests
from casckpt.errors import InvalidInput, Unsigned
from casckpt.format.keys import parse_signature, signature_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import ManifestId
from casckpt.history.commits import Commit, list_commits
from casckpt.history.transactions import open_transactions
from casckpt.repository.reading import check_requirements, fetch_record
from casckpt.repository.repository import Repository
from casckpt.repository.signing_keys import PublicKey, is_right, key_name, private_key_of, public_key_of
from casckpt.storage.base import AlreadyExists

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "signatures/"
DOMAIN = b"casckpt 2026-11-23 the signature of a checkpoint\n"


def message(id: ManifestId) -> bytes:
    """Return the message that the signers of a checkpoint sign."""
    return DOMAIN + id.encode() + b"\n"


def sign(repo: Repository, commit: Commit, key: Ed25519PrivateKey) -> str:
    """Verify a checkpoint's manifest, and write a signature for the checkpoint. Return the name of the key.

    A valid existing signature is kept. An invalid one is replaced. Raises the errors of `manifests.get`, and
    `Unsupported`.
    """
    check_requirements(repo)
    manifests.get(repo, commit)
    return _put(repo, commit.id, key)


def sign_save(repo: Repository, id: ManifestId) -> None:
    """Sign a checkpoint before its commit if ``repo`` signs its saves. A reader of the commit can then verify it."""
    if repo.signer is not None:
        _put(repo, id, private_key_of(repo.signer))


def _put(repo: Repository, id: ManifestId, key: Ed25519PrivateKey) -> str:
    public = public_key_of(key)
    place, signature = signature_key(id, key_name(public)), key.sign(message(id))
    try:
        repo.storage.put(place, signature)
    except AlreadyExists:
        if not _is_signed(repo, id, public):
            repo.storage.replace(place, signature)
    return key_name(public)


def check_trusted(repo: Repository, id: ManifestId, named: str) -> None:
    """Raise `Unsigned` if ``repo`` requires a signature and this checkpoint has none. Checks each id only once.

    ``named``: the checkpoint's name in the message. Raises `StorageError` and `Unsupported`.
    """
    if repo.trusted is None or id in repo.found_signed:
        return
    if not is_trusted(repo, id):
        names = ", ".join(sorted(key_name(key)[:12] for key in repo.trusted))
        raise Unsigned(
            f"{named} has no valid signature from {names}. If you know that it is genuine, sign it with `casckpt sign`",
            checkpoints=(id,),
        )
    repo.found_signed.add(id)


def is_trusted(repo: Repository, id: ManifestId) -> bool:
    """Return whether the signatures in the store allow a load of a checkpoint.

    Raises `StorageError` and `Unsupported`.
    """
    return repo.trusted is None or any(_is_signed(repo, id, key) for key in repo.trusted)


def get_trusted(repo: Repository, commit: Commit) -> Manifest:
    """Return a checkpoint's manifest for a load. Raises the errors of `check_trusted` and `manifests.get`."""
    check_trusted(repo, commit.id, str(commit))
    return manifests.get(repo, commit)


def check_verified(repo: Repository, *, verify: bool) -> None:
    """Raise `InvalidInput` if a signature is required but the bytes are not verified."""
    if repo.trusted is not None and not verify:
        raise InvalidInput("verify=False reads unverified bytes, but this store was opened with require_signature")


def _is_signed(repo: Repository, id: ManifestId, key: PublicKey) -> bool:
    data = fetch_record(repo, signature_key(id, key_name(key)))
    return isinstance(data, bytes) and is_right(key, data, message(id))


def list_signatures(repo: Repository) -> dict[str, ManifestId]:
    """Return all signatures, as a mapping from key to checkpoint id. Raises `StorageError`."""
    listed = repo.storage.list(PREFIX, known=parse_signature)
    return {entry.key: id for entry in listed if (id := parse_signature(entry.key)) is not None}


def signers(repo: Repository, id: ManifestId) -> list[str]:
    """Return the names of the keys that signed a checkpoint. Does not verify the signatures. Raises `StorageError`."""
    prefix = f"{PREFIX}{id}/"
    keys = (entry.key for entry in repo.storage.list(prefix))
    return sorted(key.removeprefix(prefix) for key in keys if parse_signature(key) == id)


def remove_signatures(repo: Repository) -> None:
    """Remove signatures of purged checkpoints that have no live commit and are not being copied to this store."""
    listed = list_signatures(repo)
    if not listed:
        return
    opened = [transaction.began for transaction in open_transactions(repo, ())]
    commits = list_commits(repo)
    if commits.damaged or None in opened:  # it is unknown which checkpoints are live or being copied
        return
    copied = {began.manifest for began in opened if began is not None}
    purged = {commit.id for commit in commits.commits.values() if commit.last == "purged"}
    gone = purged - {commit.id for commit in commits.live()} - copied
    for key, id in listed.items():
        if id in gone:
            repo.storage.delete(key)
