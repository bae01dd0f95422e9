"""Ranks that run as threads of this process. Any number of them can share a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from casckpt.history.commits import Commit
from casckpt.ranks.ranks import Solo
from casckpt.repository.repository import Repository
from casckpt.saving.leader import GroupMemory
from casckpt.saving.options import SaveOptions
from casckpt.saving.prepare import prepare
from casckpt.saving.save import save


class _Star:
    """The object through which the ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.up: list[Any] = [None] * size
        self.down: Sequence[Any] = ()


class _Rank(Solo):
    """One rank. An error on any rank ends all ranks."""

    def __init__(self, star: _Star, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self._star = rank, size, star

    def exchange(self, call: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        star = self._star
        try:
            star.up[self.rank] = call()
            star.barrier.wait()
            if self.rank == 0:
                star.down = decide(star.up)
            star.barrier.wait()
            answer = star.down[self.rank]
            star.barrier.wait()
        except BaseException:
            star.barrier.abort()
            raise
        return answer


class Simulated:
    """``size`` ranks. Between saves, each keeps what a process would remember.

    ``repos``: a repository for each rank, if they do not share one.
    """

    def __init__(self, repo: Repository, size: int, repos: Sequence[Repository] = ()) -> None:
        self.repos, self.size = repos or [repo] * size, size
        self._memories = [GroupMemory() for _ in range(size)]

    def save(self, state: Callable[[int], Any], options: SaveOptions) -> Commit:
        """Save on all ranks. ``state`` returns the state of a rank."""
        star, checked = _Star(self.size), options.checked()

        def run(rank: int) -> Commit:
            def mine() -> Any:
                return prepare(state(rank), None, rank=rank, allow_pickle=False)

            return save(self.repos[rank], _Rank(star, rank, self.size), self._memories[rank], mine, checked)

        with ThreadPoolExecutor(self.size) as pool:
            found = list(pool.map(run, range(self.size)))
        return found[0]
