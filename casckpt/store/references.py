"""References, as the methods of a store take them: resolved, checked for a signature, held by a lease."""

from __future__ import annotations

from contextlib import ExitStack

from casckpt.contents import refs
from casckpt.contents.checkpoint import Checkpoint, warn_if_forgotten
from casckpt.errors import NotFound, StorageError, Unsupported
from casckpt.history.commits import Commit
from casckpt.history.leases import Lease
from casckpt.repository.repository import Repository

AN_HOUR = 3600.0  # seconds, of a lease


def plain(ref: str | Checkpoint) -> str | Commit:
    """Return the text of a reference, or the commit of a checkpoint."""
    return ref.commit if isinstance(ref, Checkpoint) else ref


def resolve(repo: Repository, ref: str | Checkpoint) -> Commit:
    """Return the commit that ``ref`` names. Raises NotFound, InvalidInput, Gone, StorageError."""
    return refs.resolve(repo, plain(ref))


def resolve_to_load(repo: Repository, ref: str | Checkpoint) -> Commit:
    """Return the commit that ``ref`` names, with a warning if it is forgotten. Raises Unsigned, too."""
    commit = resolve(repo, ref)
    warn_if_forgotten(commit)
    return _trusted(repo, commit)


def resolve_held(repo: Repository, ref: str | Checkpoint, held: ExitStack) -> Commit:
    """Return the commit that ``ref`` names; a lease on it lasts until ``held`` ends."""
    try:
        commit = held.enter_context(lease(repo, ref, AN_HOUR)).commit
    except (StorageError, Unsupported) as error:
        more = "A lease is a small record in tags/; if you cannot write there, load without lease=True"
        raise type(error)(f"{error}. {more}", **error.__dict__) from error
    return _trusted(repo, commit)


def lease(repo: Repository, ref: str | Checkpoint, seconds: float) -> Lease:
    """Return a lease on the checkpoint that ``ref`` names. Raises NotFound if it is not visible."""
    commit = resolve(repo, ref)
    try:
        return Lease(repo, commit, seconds)
    except NotFound:
        if resolve(repo, ref) == commit:
            raise
    return lease(repo, ref, seconds)  # RUN@latest names another one by now


def _trusted(repo: Repository, commit: Commit) -> Commit:
    if repo.trusted is not None:
        from casckpt.contents.signatures import check_trusted  # it takes a while to import

        check_trusted(repo, commit.id, str(commit))
    return commit
