"""What is known of each save outside the store, and what the rules must keep. Works without casckpt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from soaking.books import Books, Wrong

RUN = "weeks"
OPTIM = "optim."
NEWEST, BEST, DAYS, WEEKS = 5, 3, 7, 6


def rules(saves: int) -> dict[str, Any]:
    """Return the rules of a run of so many saves, as `Checkpointer` expects them."""
    every = max(10, saves // 60)
    return {"keep_every": every, "keep_best": f"loss:{BEST}", "keep_daily": DAYS, "keep_weekly": WEEKS}


def digests(state: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the digest of each tensor of a nested state, with its dtype and shape."""
    import torch  # most processes of a soak do without

    found = dict[str, str]()
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= digests(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = f"{value.dtype} {tuple(value.shape)} ".encode()
            found[f"{prefix}{name}"] = blake2b(kind + raw, digest_size=16).hexdigest()
    return found


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is known to have been visible. ``created``: by the clock of its job, in seconds."""

    step: int
    job: int
    id: str
    created: float
    loss: float


class Ledger:
    """The saves that began, by step and job, and those that returned or were found, by step.

    ``by_job``: how many saves of each job have begun.
    """

    def __init__(self, books: Books) -> None:
        self._books, self._read = books, dict[str, int]()
        self.begun: dict[tuple[int, int], dict[str, Any]] = {}
        self.by_job: Counter[int] = Counter()
        self.saved: dict[int, Saved] = {}
        self.read()

    def read(self) -> None:
        """Read what was added to the books."""
        for one in self._new("begun"):
            self.begun[one["step"], one["job"]] = one
            self.by_job[one["job"]] += 1
        for one in self._new("saved"):
            known = self.saved.setdefault(one["step"], Saved(**one))
            if known.id != one["id"]:
                raise Wrong(f"{RUN}@{one['step']} was saved twice: {known}, {one}")

    @property
    def last(self) -> int:
        """The highest step that was saved, or 0."""
        return max(self.saved, default=0)

    def _new(self, book: str) -> Iterator[dict[str, Any]]:
        path = self._books.folder / book
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read.get(book, 0))
            for line in file:
                if not line.endswith(b"\n"):  # its end is being written
                    return
                self._read[book] = self._read.get(book, 0) + len(line)
                yield json.loads(line)

    def check(self, step: int, job: int, found: Mapping[str, str], *, thinned: bool = False) -> dict[str, Any]:
        """Compare digests with those of a save. Return what is known of it. ``thinned``: the optimizer is missing."""
        self.read()
        begun = self.begun.get((step, job))
        if begun is None:
            raise Wrong(f"{RUN}@{step} of job {job} exists, but its save never began")
        wanted = {key: value for key, value in begun["digests"].items() if not (thinned and key.startswith(OPTIM))}
        if wanted != found:
            keys = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
            raise Wrong(f"{RUN}@{step} of job {job} is not what was saved: {', '.join(keys)}")
        return begun


def kept(saved: Iterable[Saved], keep: Mapping[str, Any]) -> set[int]:
    """Return the steps that the rules keep. ``keep``: as `rules` returns it."""
    steps = sorted(saved, key=lambda one: one.step)
    found = {one.step for one in steps[-NEWEST:]} | {one.step for one in steps if one.step % keep["keep_every"] == 0}
    found |= {one.step for one in sorted(steps, key=lambda one: (one.loss, one.step))[:BEST]}
    by_time = sorted(steps, key=lambda one: one.created)
    for form, periods in (("%Y-%m-%d", DAYS), ("%G-%V", WEEKS)):
        newest = {datetime.fromtimestamp(one.created, UTC).strftime(form): one.step for one in by_time}
        found |= set(list(newest.values())[-periods:])
    return found
