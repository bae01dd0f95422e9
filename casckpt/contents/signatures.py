"""Signatures of checkpoints: detached, over a domain string and the id, which proves all that was saved.

What they do not cover is in docs/integrity.md: where the bytes lie, what else the store says of a checkpoint, and which
one a name or "latest" means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casckpt.contents import manifests
from casckpt.errors import Damaged, InvalidInput, NotFound, Refused, Unsigned
from casckpt.format.keys import parse_signature, signature_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import ManifestId
from casckpt.format.records import MAX_RECORD_BYTES
from casckpt.history.commits import Commit, list_commits
from casckpt.history.transactions import open_transactions
from casckpt.repository.repository import Repository
from casckpt.repository.requirements import check_requirements
from casckpt.repository.signing_keys import PublicKey, is_right, key_name, private_key_of, public_key_of
from casckpt.storage.base import AlreadyExists

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "signatures/"
DOMAIN = b"casckpt 2026-11-23 the signature of a checkpoint\n"


def message(id: ManifestId) -> bytes:
    """Return what is signed of a checkpoint."""
    return DOMAIN + id.encode() + b"\n"


def sign(repo: Repository, commit: Commit, key: Ed25519PrivateKey) -> str:
    """Put a signature of a checkpoint, whose manifest is there and is what its record says; the name of the key.

    One that is there and right stays; another one is replaced. Raises what `manifests.get` does, `Unsupported`.
    """
    check_requirements(repo)
    manifests.get(repo, commit)
    return _put(repo, commit.id, key)


def sign_save(repo: Repository, id: ManifestId) -> None:
    """Sign what is about to be committed, where saves of ``repo`` are signed: who sees the commit sees that, too."""
    if repo.signer is not None:
        _put(repo, id, private_key_of(repo.signer))


def _put(repo: Repository, id: ManifestId, key: Ed25519PrivateKey) -> str:
    public = public_key_of(key)
    place, said = signature_key(id, key_name(public)), message(id)
    try:
        repo.storage.put(place, key.sign(said))
    except AlreadyExists:
        if not _is_signed(repo, id, public):
            repo.storage.replace(place, key.sign(said))
    return key_name(public)


def check_trusted(repo: Repository, id: ManifestId, named: str) -> None:
    """Raise `Unsigned` where ``repo`` is to be read only if it is signed, and this is not. Asked once for each id.

    ``named``: what to call it. Raises `StorageError`, `Unsupported`.
    """
    if repo.trusted is None or id in repo.found_signed:
        return
    if not is_trusted(repo, id):
        names = ", ".join(sorted(key_name(key)[:12] for key in repo.trusted))
        raise Unsigned(
            f"{named} has no right signature of {names}. Who knows it to be right makes one with `casckpt sign`",
            checkpoints=(id,),
        )
    repo.found_signed.add(id)


def is_trusted(repo: Repository, id: ManifestId) -> bool:
    """Tell whether a checkpoint may be loaded, by what lies in the store now. Raises `StorageError`, `Unsupported`."""
    return repo.trusted is None or any(_is_signed(repo, id, key) for key in repo.trusted)


def get_trusted(repo: Repository, commit: Commit) -> Manifest:
    """Return the manifest of a checkpoint that is to be loaded. Raises what `check_trusted` and `manifests.get` do."""
    check_trusted(repo, commit.id, str(commit))
    return manifests.get(repo, commit)


def check_verified(repo: Repository, *, verify: bool) -> None:
    """Raise `InvalidInput` where only what is signed is to be read, and bytes are not compared with that."""
    if repo.trusted is not None and not verify:
        raise InvalidInput("verify=False reads what nobody signed, and this store was opened with require_signature")


def _is_signed(repo: Repository, id: ManifestId, key: PublicKey) -> bool:
    try:
        data = repo.storage.get(signature_key(id, key_name(key)), limit=MAX_RECORD_BYTES)
    except (NotFound, Damaged, Refused):
        return False
    return is_right(key, data, message(id))


def list_signatures(repo: Repository) -> dict[str, ManifestId]:
    """List all signatures: key, and the checkpoint it is of. Raises `StorageError`."""
    listed = repo.storage.list(PREFIX, known=parse_signature)
    return {entry.key: id for entry in listed if (id := parse_signature(entry.key)) is not None}


def signers(repo: Repository, id: ManifestId) -> list[str]:
    """Return the names of the keys that claim to have signed a checkpoint; nobody has looked. Raises `StorageError`."""
    prefix = f"{PREFIX}{id}/"
    return sorted(one.key.removeprefix(prefix) for one in repo.storage.list(prefix) if parse_signature(one.key) == id)


def remove_signatures(repo: Repository) -> None:
    """Remove those of checkpoints that were purged, and of which no commit lives or is being copied to here.

    A copy that begins meanwhile may lose one, which the next copy brings. Raises `StorageError`.
    """
    listed = list_signatures(repo)
    if not listed:
        return
    opened = [one.began for one in open_transactions(repo, ())]
    commits = list_commits(repo)
    if commits.damaged or None in opened:  # nobody knows what lives, or is copied
        return
    copied = {began.manifest for began in opened if began is not None}
    purged = {one.id for one in commits.commits.values() if one.last == "purged"}
    gone = purged - {one.id for one in commits.live()} - copied
    for key, id in listed.items():
        if id in gone:
            repo.storage.delete(key)
