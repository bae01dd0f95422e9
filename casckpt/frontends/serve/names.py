"""The names of a hub for what is in a store: runs are repositories, checkpoints are revisions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from casckpt.base.names import run_hash

MAIN: Final = "main"
LATEST: Final = (MAIN, "latest")
COMMIT_DIGITS: Final = 40

_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_RESERVED = frozenset({
    "api", "models", "datasets", "spaces", "kernels", "buckets", "resolve", "raw", "blob", "revision", "tree", "refs",
    "commits", "paths-info",
})  # fmt: skip
"""Parts of the paths of a hub: as a part of a repository's name they could be taken for that."""
NAMESPACE: Final = "runs/"
"""May stand before any repository: what parses ``hf://`` paths wants names of two parts."""
_ALIAS = re.compile(r".+-[0-9a-f]{8}")
_STEP = re.compile(r"[0-9]{1,19}")
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS}}}|[0-9a-f]{{64}}")
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def is_repo(run: str) -> bool:
    """Tell whether the clients of a hub take the name of a run for that of a repository."""
    parts = run.split("/")
    plain = all(_PART.fullmatch(part) and part.lower() not in _RESERVED for part in parts)
    fits = len(parts) <= 2 and not run.startswith(NAMESPACE) and not run.endswith(".git")
    return plain and fits and "--" not in run and ".." not in run


def repo_of(run: str) -> str:
    """The repository that a run is: its own name, or where no client takes that, a like one with a part of its hash.

    It is the same for ever, whatever other runs there are.
    """
    if is_repo(run):
        return run
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", run).strip("-")[:80].rstrip("-")
    return f"{plain}-{run_hash(run)[:8]}"


def run_of(repo: str, runs: Iterable[str]) -> str:
    """The run of a repository. ``runs``: all that there are; asked for only where the name may stand for another.

    A run that has this very name goes first.
    """
    repo = repo.removeprefix(NAMESPACE)
    if not _ALIAS.fullmatch(repo):
        return repo
    every = tuple(runs)
    return repo if repo in every else next((run for run in every if repo_of(run) == repo), repo)


def is_of(run: str, repo: str) -> bool:
    """Tell whether a run is this repository."""
    return repo_of(run) == repo.removeprefix(NAMESPACE)


def reference(run: str, revision: str) -> str | None:
    """What casckpt calls a revision of a run; None for what names none.

    ``main`` and ``latest`` are the newest, a number is a step, 40 or 64 hex digits begin an id, all else is a tag.
    """
    if revision in LATEST:
        return f"{run}@latest"
    if _STEP.fullmatch(revision):
        return f"{run}@{revision}"
    if _COMMIT.fullmatch(revision):
        return revision
    return f"tag:{revision}" if _TAG.fullmatch(revision) else None


def commit_of(id: str) -> str:
    """The id of a checkpoint as a hub's clients take it."""
    return id[:COMMIT_DIGITS]
