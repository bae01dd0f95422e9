"""The errors that a load raises for missing or wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

from casckpt.contents.manifests import blobs_of
from casckpt.errors import CasckptError, Damaged
from casckpt.format.manifest import Manifest
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit, CommitList, gone, list_commits
from casckpt.repository.repository import Repository


class Lost(Exception):
    """Raised if bytes of a blob that the tensor ``key`` needs are missing or wrong."""

    def __init__(self, ref: BlobRef, key: str, why: str) -> None:
        super().__init__(why)
        self.ref, self.key = ref, key


def damaged_error(repo: Repository, manifest: Manifest, ref: BlobRef, key: str, why: str) -> CasckptError:
    """Return the error for missing or wrong bytes: Damaged, or Gone if the checkpoint was purged in the meantime."""
    commits = list_commits(repo)
    head = manifest.head.digest  # other commits with the same id may use different blobs
    same = [c for c in commits.commits.values() if c.last != "revoked" and c.committed.head == head]
    name = f"{manifest.body.run}@{manifest.body.step}"
    if same and not any(commit.live for commit in same):
        return gone(f"{name} ({manifest.id})", manifest.id, "while it was read", key=key)
    users = list(checkpoints_using(repo, commits, ref))
    listed = ", ".join(map(str, users[:8])) + (", ..." if len(users) > 8 else "")
    return Damaged(
        f"blob {ref.hash} is damaged: {why}. Tensor {key!r} of {name} needs it, "
        f"and so do these checkpoints: {listed}. The contents of the load's target are now undefined. "
        "Run `casckpt verify`, then `casckpt repair`, on the store",
        key=key,
        blob=ref.hash,
        checkpoints=tuple(commit.id for commit in users),
    )


def checkpoints_using(repo: Repository, commits: CommitList, ref: BlobRef) -> Iterator[Commit]:
    """Yield the live checkpoints that refer to a blob. Skip checkpoints whose manifest cannot be read."""
    for commit in commits.live():
        try:
            if any((uploader, name) == (ref.uploader, ref.hash) for uploader, name, _ in blobs_of(repo, commit)):
                yield commit
        except CasckptError:
            continue
