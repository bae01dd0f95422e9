"""Presents a store as a hub: its names, repositories, revisions and trees, as JSON for ``huggingface_hub``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.base.groups import grouped
from casckpt.base.names import run_hash
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, NotFound
from casckpt.frontends.interchange.safetensors.files import NAMES
from casckpt.frontends.interchange.safetensors.layout import MAX_SHARD_BYTES, plan_shards
from casckpt.frontends.interchange.safetensors.planned import CONFIG
from casckpt.frontends.serve.answers import no_file, no_repository, no_revision
from casckpt.frontends.serve.folders import File, ServedFolder, ServedFolders
from casckpt.store.store import Store

MAIN: Final = "main"
LATEST: Final = (MAIN, "latest")
COMMIT_DIGITS: Final = 40

_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_RESERVED = frozenset({
    "api", "models", "datasets", "spaces", "kernels", "buckets", "resolve", "raw", "blob", "revision", "tree", "refs",
    "commits", "paths-info",
})  # fmt: skip
"""Words that occur in hub paths. As part of a repository name, they would be ambiguous."""
NAMESPACE: Final = "runs/"
"""An optional prefix of every repository name. Parsers of ``hf://`` paths need it, because they require two parts."""
_ALIAS = re.compile(r".+-[0-9a-f]{8}")
_STEP = re.compile(r"[0-9]{1,19}")
_ID = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS}}}|[0-9a-f]{{64}}")
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def is_repo(run: str) -> bool:
    """Return whether hub clients accept a run's name as a repository name."""
    parts = run.split("/")
    plain = all(_PART.fullmatch(part) and part.lower() not in _RESERVED for part in parts)
    fits = len(parts) <= 2 and not run.startswith(NAMESPACE) and not run.endswith(".git")
    return plain and fits and "--" not in run and ".." not in run


def repo_of(run: str) -> str:
    """Return a run's repository name: the run's name, or, if clients reject it, a similar name with a hash.

    The repository name never changes and does not depend on other runs.
    """
    if is_repo(run):
        return run
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", run).strip("-")[:80].rstrip("-")
    return f"{plain}-{run_hash(run)[:8]}"


def run_of(repo: str, runs: Iterable[str]) -> str:
    """Return the run of a repository. A run with exactly this name takes precedence.

    ``runs``: all runs. The function iterates over them only if the name may belong to a run with a different name.
    """
    repo = repo.removeprefix(NAMESPACE)
    if not _ALIAS.fullmatch(repo):
        return repo
    every = tuple(runs)
    return repo if repo in every else next((run for run in every if repo_of(run) == repo), repo)


def is_of(run: str, repo: str) -> bool:
    """Return whether ``repo`` is the repository of a run."""
    return repo_of(run) == repo.removeprefix(NAMESPACE)


def reference(run: str, revision: str) -> str | None:
    """Return the casckpt reference for a revision of a run; None if the revision is not a valid name.

    ``main`` and ``latest`` name the newest checkpoint. A number is a step, 40 or 64 hex digits are an id, and anything
    else is a tag.
    """
    if revision in LATEST:
        return f"{run}@latest"
    if _STEP.fullmatch(revision):
        return f"{run}@{revision}"
    if _ID.fullmatch(revision):
        return revision
    return f"tag:{revision}" if _TAG.fullmatch(revision) else None


def commit_of(id: str) -> str:
    """Return the hub commit hash for the id of a checkpoint."""
    return id[:COMMIT_DIGITS]


Json: TypeAlias = dict[str, Any]
_LEASE = re.compile(r"lease-[0-9a-f]{16}")
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS},}}")


class Hub:
    """A store under hub names.

    Raises InvalidInput if ``max_shard_size`` is below 1. The methods raise `Refusal` for anything that does not exist.
    They also raise the errors of the store.
    """

    def __init__(self, store: Store, *, max_shard_size: int | None = None) -> None:
        # raises an error for an invalid size now instead of at each request
        plan_shards((), MAX_SHARD_BYTES if max_shard_size is None else max_shard_size)
        self.store = store
        self.folders = ServedFolders(store, max_shard_size)

    def repos(self) -> dict[str, list[Checkpoint]]:
        """Return the visible checkpoints of each repository, oldest first.

        The most recently saved repository comes first.
        """
        by_run = grouped(self._checkpoints(), lambda checkpoint: checkpoint.run)
        of_repo: dict[str, list[Checkpoint]] = {}
        for run in sorted(by_run, key=lambda run: (run != repo_of(run), run)):  # the same choice as in `run_of`
            of_repo.setdefault(repo_of(run), by_run[run])
        return dict(sorted(of_repo.items(), key=lambda item: item[1][-1].created_at, reverse=True))

    def tags(self) -> dict[str, Checkpoint]:
        """Return the store's tags except leases, which come and go with downloads."""
        return {name: tagged for name, tagged in self.store.tags().items() if not _LEASE.fullmatch(name)}

    def _checkpoints(self) -> list[Checkpoint]:
        try:
            return self.store.checkpoints()
        except NotFound:  # the store does not exist yet
            return []

    def run(self, repo: str) -> str:
        """Return the run of a repository. The run need not exist."""
        return run_of(repo, self._runs())

    def _runs(self) -> Iterator[str]:
        """Yield all runs. The store is listed only when the first run is requested."""
        yield from sorted({checkpoint.run for checkpoint in self._checkpoints()})

    def checkpoint(self, repo: str, revision: str) -> Checkpoint:
        """Return the checkpoint that a revision of a repository currently names."""
        run = self.run(repo)
        if not is_of(run, repo):
            raise no_repository(repo)
        ref = reference(run, revision)
        try:
            named = None if ref is None else self.store.get(ref)
        except (NotFound, InvalidInput):
            named = None
        if named is not None and named.run == run:
            return named
        if any(checkpoint.run == run for checkpoint in self._checkpoints()):
            raise no_revision(repo, revision)
        raise no_repository(repo)

    def folder(self, repo: str, revision: str) -> ServedFolder:
        """Return the files of a revision. A revision that is an id is not looked up while its folder is in memory."""
        held = self.folders.held(revision) if _COMMIT.fullmatch(revision) else None
        if held is not None and is_of(held.checkpoint.run, repo):
            return held
        return self.folders.of(self.checkpoint(repo, revision))

    def file(self, repo: str, revision: str, path: str) -> tuple[ServedFolder, File]:
        """Return one file of a revision."""
        folder = self.folder(repo, revision)
        if path not in folder.files:
            raise no_file(path, commit_of(folder.checkpoint.id))
        return folder, folder.files[path]

    def models(self, search: str) -> list[Json]:
        """Describe each repository whose name contains ``search``."""
        return [_head(repo, saved[-1]) for repo, saved in self.repos().items() if search.lower() in repo.lower()]

    def info(self, repo: str, revision: str, *, blobs: bool) -> Json:
        """Describe a revision. ``blobs``: include the sizes and ETags of its files."""
        folder = self.folder(repo, revision)
        siblings = [{"rfilename": file.name} | (_size(file) if blobs else {}) for file in folder.files.values()]
        counts = Counter[str]()
        for tensor in folder.tensors:
            counts[NAMES[tensor.entry.dtype]] += tensor.entry.numel
        kind = {"library_name": "transformers"} if CONFIG in folder.files else {}
        return _head(repo, folder.checkpoint) | kind | {
            "siblings": siblings,
            "safetensors": {"parameters": dict(counts), "total": counts.total()},
            "usedStorage": sum(file.nbytes for file in folder.files.values()),
        }  # fmt: skip

    def refs(self, repo: str) -> Json:
        """Return a repository's only branch, `main`, and its tags, which are its steps and the store's tags."""
        newest, run = self.checkpoint(repo, MAIN), self.run(repo)
        steps = {str(checkpoint.step): checkpoint for checkpoint in self.store.checkpoints(run)}
        of_store = {name: tagged for name, tagged in self.tags().items() if tagged.run == run and name not in steps}
        tags = [_ref("tags", name, checkpoint) for name, checkpoint in (steps | of_store).items()]
        return {"branches": [_ref("heads", MAIN, newest)], "converts": [], "tags": tags, "pullRequests": []}

    def commits(self, repo: str, revision: str) -> list[Json]:
        """Return a revision and all earlier checkpoints of the run, newest first."""
        last = self.checkpoint(repo, revision)
        until = [earlier for earlier in self.store.checkpoints(last.run) if earlier.created_at <= last.created_at]
        every = until if last in until else [*until, last]
        return [{**_commit(saved), "message": "", "authors": [{"user": "casckpt"}]} for saved in reversed(every)]

    def tree(self, repo: str, revision: str, path: str, *, recursive: bool, expand: bool) -> list[Json]:
        """Return the files and subfolders of one folder of a revision."""
        folder = self.folder(repo, revision)
        prefix = f"{path}/" if path else ""
        below = [file for file in folder.files.values() if file.name.startswith(prefix)]
        if not below:
            raise no_file(path, commit_of(folder.checkpoint.id))
        listed = [entry for entry in _entries(below, prefix) if recursive or "/" not in entry["path"][len(prefix) :]]
        return [entry | _last(folder, expand=expand) for entry in listed]

    def paths(self, repo: str, revision: str, paths: Sequence[str], *, expand: bool) -> list[Json]:
        """Return the files and folders of a revision whose paths are in ``paths``."""
        folder = self.folder(repo, revision)
        every = {entry["path"]: entry for entry in _entries(list(folder.files.values()), "")}
        return [every[path] | _last(folder, expand=expand) for path in dict.fromkeys(paths) if path in every]


def _entries(files: Sequence[File], prefix: str) -> Iterator[Json]:
    """Yield all files, and the folders below ``prefix`` that contain them."""
    folders: set[str] = set()
    for file in files:
        parts = file.name[len(prefix) :].split("/")[:-1]
        for count in range(1, len(parts) + 1):
            name = prefix + "/".join(parts[:count])
            if name not in folders:
                folders.add(name)
                yield {"type": "directory", "oid": hex_digest(name.encode())[:40], "size": 0, "path": name}
        yield {"type": "file", "oid": file.etag, "size": file.nbytes, "path": file.name}


def _size(file: File) -> Json:
    return {"size": file.nbytes, "blobId": file.etag}


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
