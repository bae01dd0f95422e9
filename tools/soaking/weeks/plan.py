"""What happens in a soak: drawn from its seed and the number of a job, so that a continued soak draws the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soaking.weeks.ledger import NEWEST

if TYPE_CHECKING:
    from soaking.weeks.place import Place

DAY = 86400.0
SPAN, STEP = 42 * DAY, DAY / 4  # seconds: how far the clocks move during a soak, and by how much they are set at most
RANKS = (1, 2, 3)
KEYS = 5
LAST_MIRRORED, MIRRORED = 50, 5  # the rules of the mirror: the newest, and one of so many steps
ENDS = ("end", "all ranks", "one rank", "all ranks in a save", "one rank in a save", "SIGTERM", "full disk", "end")
IN_A_SAVE = 0.4  # seconds: longer than most saves take
STARTING = 8.0  # seconds: longer than most ranks take until they resume
UPKEEP = (
    "thin", "gc", "gc at once", "gc by rules", "copy", "copy", "gc of the mirror", "verify a part",
    "verify some of the mirror", "verify signatures",
)  # fmt: skip


@dataclass(frozen=True)
class JobPlan:
    """A job. ``after``: how many of its saves have begun when it is struck, or the disk is full.

    ``delay``: the seconds from then on. ``beside``, ``upkeep``: the commands during the job, and after it.
    ``ahead``: by how many seconds its clock is ahead. ``beside_ahead``: that of the command.
    """

    number: int
    ranks: int
    saves: int
    key: int
    ahead: float
    mirrored: bool
    prove: bool
    end: str
    after: int
    delay: float
    beside: str
    beside_ahead: float
    beside_killed: float
    upkeep: tuple[str, ...]
    library: str
    other: str


def _chance(*what: object) -> random.Random:
    return random.Random(str(what))  # noqa: S311 - nothing is secret


def _dealt(deck: Sequence[str], seed: int, number: int) -> str:
    """Return the next card. Each card comes once before any comes again."""
    cards = list(deck)
    _chance(seed, *deck, number // len(cards)).shuffle(cards)
    return cards[number % len(cards)]


def draw(seed: int, number: int, *, part: float, most: int, interval: float, last_ranks: int) -> JobPlan:
    """Return the plan of a job.

    ``part``: of the soak is done, from 0 to 1. ``most``: saves of a job. ``interval``: seconds between two saves.
    """
    drawn = _chance(seed, number)
    count = drawn.randint(1 + most // 8, most)
    end = _dealt(ENDS, seed, number)
    at_once = end.endswith("in a save") or end in {"SIGTERM", "full disk"}
    after = drawn.randint(1 if at_once else 0, count)
    pause = IN_A_SAVE if end.endswith("in a save") else STARTING if after == 0 else interval
    newer = part >= 0.5
    return JobPlan(
        number=number, ranks=drawn.choice([one for one in RANKS if one != last_ranks]), saves=count,
        key=min(KEYS - 1, int(part * KEYS)), ahead=_ahead(drawn, part), mirrored=drawn.random() < 0.5,
        prove=drawn.random() < 0.5, end=end, after=after, delay=drawn.uniform(0, pause),
        beside=_dealt(UPKEEP, seed + 1, number), beside_ahead=_ahead(drawn, part),
        beside_killed=drawn.uniform(0.2, 2) if drawn.random() < 0.3 else 0.0,
        upkeep=tuple(_dealt(UPKEEP, seed, 2 * number + one) for one in range(2)),
        library="after" if newer else "before", other=drawn.choice(["before", "after"]),
    )  # fmt: skip


def _ahead(drawn: random.Random, part: float) -> float:
    return part * SPAN + (drawn.uniform(-STEP, STEP) if drawn.random() < 0.5 else 0.0)


def command(name: str, place: Place, number: int, keep: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a command."""
    store, mirror = place.store, place.mirror
    mirrored = ["--keep-last", str(LAST_MIRRORED), "--keep-every", str(MIRRORED)]
    trusted = [word for key in range(KEYS) for word in ("--require-signature", str(place.key(key, public=True)))]
    by_rules = ["gc", str(store), "--keep-last", str(NEWEST), *options(keep)]
    return {
        "init": ["init", str(store), "--cell-size", "64KiB", "--blob-size", "1MiB"],
        "mirror": ["settings", str(store), "--set", f"mirror={mirror}"],
        "thin": ["thin", str(store), "--drop", "optim.*", "--keep-last", str(NEWEST + 3)],
        "gc": ["gc", str(store)],
        "gc at once": ["gc", str(store), "--min-age", "0", "--wait", "5s"],
        "gc by rules": by_rules,
        "final gc": [*by_rules, "--min-age", "0"],
        "copy": ["copy", str(store), str(mirror)],
        "gc of the mirror": ["gc", str(mirror), *mirrored, "--wait", "5s"],
        "final gc of the mirror": ["gc", str(mirror), "--min-age", "0"],
        "verify a part": ["verify", str(store), "--part", f"{number % 7 + 1}/7"],
        "verify some of the mirror": ["verify", str(mirror), "--part", f"{number % 10 + 1}/10", "--decode"],
        "verify signatures": ["verify", str(store), "--quick", *trusted],
        "tag": ["tag", str(store), f"key-{number}", "weeks@latest"],
        "list": ["list", str(store)],
        "stats": ["stats", str(store)],
        "status": ["status", str(store)],
    }[name]


def options(keep: Mapping[str, Any]) -> list[str]:
    """Return rules as options of the command line."""
    return [word for name, value in keep.items() for word in (f"--{name.replace('_', '-')}", str(value))]
