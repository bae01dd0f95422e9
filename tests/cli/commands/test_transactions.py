from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import casckpt
from casckpt.history.transactions import begin
from tests.cli.conftest import AsJson, Run


def test_transactions_are_listed_and_revoked(saved: Path, store: casckpt.Store, as_json: AsJson, run: Run) -> None:
    assert as_json("transactions", saved) == []
    transaction = begin(store.repository, "a", 4)
    (row,) = as_json("transactions", saved)
    assert (row["txid"], row["run"], row["step"], row["pid"]) == (transaction.txid, "a", 4, os.getpid())
    assert row["alive"] is True
    assert datetime.fromisoformat(row["since"]).tzinfo == UTC
    assert "(alive)" in run("transactions", saved).stdout
    assert as_json("transactions", saved, "--revoke", row["txid"]) == {"revoked": row["txid"]}
    assert as_json("transactions", saved) == []
    assert as_json("transactions", saved, "--revoke", row["txid"], status=5)["error"]["kind"] == "conflict"
    as_json("transactions", saved, "--revoke", "nonsense", status=2)
    as_json("transactions", saved, "--revoke", row["txid"].replace("-4", "-5"), status=3)
    assert transaction.abort("test")


def test_saves_with_lost_records_are_listed_and_revoked(saved: Path, as_json: AsJson, run: Run) -> None:
    (saved / "commits").rename(saved / "away")
    lost = sorted(path.name for path in (saved / "away").iterdir())
    assert "records are missing" in run("gc", saved, "--keep-last", 1, status=4).output
    found = as_json("verify", saved, status=4)["records"]
    assert [row["key"] for row in found] == [f"commits/{txid}" for txid in lost]
    for txid in lost:
        assert as_json("transactions", saved, "--give-up", txid) == {"given_up": txid}
    as_json("transactions", saved, "--give-up", lost[0], status=5)
    assert as_json("verify", saved)["records"] == []
    assert as_json("gc", saved)["deleted_manifests"] == 4
