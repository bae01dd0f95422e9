"""The announcements in a store, read independently of any follower."""

from __future__ import annotations

from casckpt.format.keys import parse_announcement
from casckpt.format.records import Announced
from casckpt.history.commits import list_commits
from casckpt.repository.repository import Repository


def announcements(repo: Repository, run: str = "") -> list[tuple[int, list[tuple[str, int]]]]:
    """Return (number, announced records) of each announcement of each run, or of the run with this hash."""
    names = [(name[1], entry.key) for entry in repo.storage.list("runs/") if (name := parse_announcement(entry.key))]
    found = ((number, repo.get_record(key, Announced)) for number, key in sorted(names) if f"/{run}" in key)
    return [(number, list(record.announced)) for number, record in found]


def undecided(repo: Repository) -> list[tuple[str, int]]:
    """Return (txid, number) of the announced records that do not exist."""
    there = {txid: commit.number for txid, commit in list_commits(repo).commits.items()}
    told = [one for _, some in announcements(repo) for one in some]
    return sorted((txid, number) for txid, number in told if there.get(txid, -1) < number)  # type: ignore[call-overload]  # a txid


def untold(repo: Repository) -> list[tuple[str, int]]:
    """Return the commits and restored checkpoints, as (txid, number), that no announcement mentions."""
    told = {(txid, number) for _, some in announcements(repo) for txid, number in some}
    listed = [one for one in list_commits(repo).commits.values() if one.last != "revoked"]
    wanted = {(one.txid, 0) for one in listed} | {(one.txid, one.restored) for one in listed if one.last == "restored"}
    return sorted(wanted - told)
