"""What a hub says of a store: repositories, revisions, trees. Plain data, as ``huggingface_hub`` reads it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.base.groups import grouped
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.interchange.safetensors.files import NAMES
from casckpt.frontends.interchange.safetensors.layout import plan_shards
from casckpt.frontends.interchange.safetensors.planned import CONFIG
from casckpt.frontends.serve.answers import no_file, no_repository, no_revision
from casckpt.frontends.serve.folders import File, ServedFolder, ServedFolders
from casckpt.frontends.serve.names import COMMIT_DIGITS, MAIN, commit_of, is_of, reference, repo_of, run_of
from casckpt.frontends.views.view import Rules
from casckpt.store.store import Store

Json: TypeAlias = dict[str, Any]
MAX_SHARD_SIZE: Final = 5_000_000_000
_LEASE = re.compile(r"lease-[0-9a-f]{16}")
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS},}}")


class Hub:
    """A store by the names of a hub. ``rules``: of the view of every checkpoint; None: each has its own.

    Raises InvalidInput for files of no bytes. All of it raises `Refusal` for what is not there, else the errors of a
    store.
    """

    def __init__(self, store: Store, *, rules: Rules | None = None, max_shard_size: int = MAX_SHARD_SIZE) -> None:
        plan_shards((), max_shard_size)  # refuses what would be refused at each request
        self.store = store
        self.folders = ServedFolders(store, rules, max_shard_size)

    def repos(self) -> dict[str, list[Checkpoint]]:
        """The visible checkpoints of each repository, oldest first; that with the newest comes first."""
        found = grouped(self._checkpoints(), lambda one: one.run)
        of_repo: dict[str, list[Checkpoint]] = {}
        for run in sorted(found, key=lambda run: (run != repo_of(run), run)):  # as `run_of` chooses
            of_repo.setdefault(repo_of(run), found[run])
        return dict(sorted(of_repo.items(), key=lambda item: item[1][-1].created_at, reverse=True))

    def tags(self) -> dict[str, Checkpoint]:
        """The tags of the store, but for leases: these come and go with what is sent."""
        return {name: one for name, one in self.store.tags().items() if not _LEASE.fullmatch(name)}

    def _checkpoints(self) -> list[Checkpoint]:
        try:
            return self.store.checkpoints()
        except NotFound:  # there is no store yet
            return []

    def run(self, repo: str) -> str:
        """The run of a repository, be there one or not."""
        return run_of(repo, self._runs())

    def _runs(self) -> Iterator[str]:
        """All runs, which are looked up by whoever goes through them."""
        yield from sorted({one.run for one in self._checkpoints()})

    def checkpoint(self, repo: str, revision: str) -> Checkpoint:
        """The checkpoint that a revision of a repository means now."""
        run = self.run(repo)
        if not is_of(run, repo):
            raise no_repository(repo)
        ref = reference(run, revision)
        try:
            found = None if ref is None else self.store.get(ref)
        except (NotFound, InvalidInput):
            found = None
        if found is not None and found.run == run:
            return found
        if any(one.run == run for one in self._checkpoints()):
            raise no_revision(repo, revision)
        raise no_repository(repo)

    def folder(self, repo: str, revision: str) -> ServedFolder:
        """The files of a revision. What an id named once is not looked up again."""
        held = self.folders.held(revision) if _COMMIT.fullmatch(revision) else None
        if held is not None and is_of(held.checkpoint.run, repo):
            return held
        return self.folders.of(self.checkpoint(repo, revision))

    def file(self, repo: str, revision: str, path: str) -> tuple[ServedFolder, File]:
        """One file of a revision."""
        folder = self.folder(repo, revision)
        if path not in folder.files:
            raise no_file(path, commit_of(folder.checkpoint.id))
        return folder, folder.files[path]

    def models(self, search: str) -> list[Json]:
        """A line of each repository whose name has ``search`` in it."""
        return [_head(repo, found[-1]) for repo, found in self.repos().items() if search.lower() in repo.lower()]

    def info(self, repo: str, revision: str, *, blobs: bool) -> Json:
        """What there is to say of a revision. ``blobs``: sizes and ETags of its files, too."""
        folder = self.folder(repo, revision)
        siblings = [{"rfilename": one.name} | (_size(one) if blobs else {}) for one in folder.files.values()]
        counts = Counter[str]()
        for tensor in folder.tensors:
            counts[NAMES[tensor.entry.dtype]] += tensor.entry.numel
        kind = {"library_name": "transformers"} if CONFIG in folder.files else {}
        return _head(repo, folder.checkpoint) | kind | {
            "siblings": siblings,
            "safetensors": {"parameters": dict(counts), "total": counts.total()},
            "usedStorage": sum(one.nbytes for one in folder.files.values()),
        }  # fmt: skip

    def refs(self, repo: str) -> Json:
        """Its branch, which is `main`; and as tags its steps, and the tags of the store on its checkpoints."""
        newest, run = self.checkpoint(repo, MAIN), self.run(repo)
        steps = {str(one.step): one for one in self.store.checkpoints(run)}
        named = steps | {name: one for name, one in self.tags().items() if one.run == run and name not in steps}
        tags = [_ref("tags", name, one) for name, one in named.items()]
        return {"branches": [_ref("heads", MAIN, newest)], "converts": [], "tags": tags, "pullRequests": []}

    def commits(self, repo: str, revision: str) -> list[Json]:
        """A revision and all checkpoints of the run that were saved before it, newest first."""
        last = self.checkpoint(repo, revision)
        found = [one for one in self.store.checkpoints(last.run) if one.created_at <= last.created_at]
        every = found if last in found else [*found, last]
        return [{**_commit(one), "message": "", "authors": [{"user": "casckpt"}]} for one in reversed(every)]

    def tree(self, repo: str, revision: str, path: str, *, recursive: bool, expand: bool) -> list[Json]:
        """The files of a folder of a revision, and its folders."""
        folder = self.folder(repo, revision)
        prefix = f"{path}/" if path else ""
        below = [one for one in folder.files.values() if one.name.startswith(prefix)]
        if not below:
            raise no_file(path, commit_of(folder.checkpoint.id))
        deep = [one for one in _entries(below, prefix) if recursive or "/" not in one["path"][len(prefix) :]]
        return [one | _last(folder, expand=expand) for one in deep]

    def paths(self, repo: str, revision: str, paths: Sequence[str], *, expand: bool) -> list[Json]:
        """Those of some paths that are files or folders of a revision."""
        folder = self.folder(repo, revision)
        every = {one["path"]: one for one in _entries(list(folder.files.values()), "")}
        return [every[path] | _last(folder, expand=expand) for path in dict.fromkeys(paths) if path in every]


def _entries(files: Sequence[File], prefix: str) -> Iterator[Json]:
    """All files, and the folders between them and ``prefix``."""
    folders: set[str] = set()
    for one in files:
        parts = one.name[len(prefix) :].split("/")[:-1]
        for count in range(1, len(parts) + 1):
            name = prefix + "/".join(parts[:count])
            if name not in folders:
                folders.add(name)
                yield {"type": "directory", "oid": hex_digest(name.encode())[:40], "size": 0, "path": name}
        yield {"type": "file", "oid": one.etag, "size": one.nbytes, "path": one.name}


def _size(one: File) -> Json:
    return {"size": one.nbytes, "blobId": one.etag}


def _head(repo: str, checkpoint: Checkpoint) -> Json:
    moment = _time(checkpoint.created_at)
    author = {"author": repo.partition("/")[0]} if "/" in repo else {}
    return author | {
        "_id": commit_of(checkpoint.id)[:24], "id": repo, "modelId": repo, "sha": commit_of(checkpoint.id),
        "lastModified": moment, "createdAt": moment, "private": False, "gated": False, "disabled": False,
        "downloads": 0, "likes": 0, "tags": ["safetensors"],
    }  # fmt: skip


def _ref(kind: str, name: str, checkpoint: Checkpoint) -> Json:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit_of(checkpoint.id)}


def _commit(checkpoint: Checkpoint) -> Json:
    return {
        "id": commit_of(checkpoint.id), "title": f"step {checkpoint.step}", "date": _time(checkpoint.created_at),
    }  # fmt: skip


def _last(folder: ServedFolder, *, expand: bool) -> Json:
    return {"lastCommit": _commit(folder.checkpoint)} if expand else {}


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"
