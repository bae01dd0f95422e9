"""Maps store names to hub names: runs are repositories, and checkpoints are revisions. The functions are pure."""

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
"""Words that occur in hub paths. As part of a repository name, they would be ambiguous."""
NAMESPACE: Final = "runs/"
"""An optional prefix of every repository name. Parsers of ``hf://`` paths need it, because they require two parts."""
_ALIAS = re.compile(r".+-[0-9a-f]{8}")
_STEP = re.compile(r"[0-9]{1,19}")
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS}}}|[0-9a-f]{{64}}")
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
    if _COMMIT.fullmatch(revision):
        return revision
    return f"tag:{revision}" if _TAG.fullmatch(revision) else None


def commit_of(id: str) -> str:
    """Return the hub commit hash for the id of a checkpoint."""
    return id[:COMMIT_DIGITS]
