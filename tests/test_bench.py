"""tools/bench runs, and its results hold what they should. What the figures are is not looked at here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main
from benchmarks.scenarios.base import Bench, Options
from tests.support.scripts import Done, run_script
from tests.support.shared import made_once

ROOT = Path(__file__).resolve().parent.parent
METRICS = {"blocked", "durable", "cpu", "written", "read", "asked", "stored", "load_average"}
ROUNDS = 2


def bench(*arguments: str | Path) -> Done:
    """What tools/bench runs when the environment is there."""
    return run_script("benchmarks", *arguments, environment={"PYTHONPATH": str(ROOT / "tools")})


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a smoke run; its folder holds nothing else afterwards."""

    def run(folder: Path) -> None:
        place = folder / "place"
        place.mkdir()
        asked = ("frozen", "partial", "--quick", "--peers", "safetensors", "--before", ROOT)
        done = bench(*asked, "--dir", place, "--json", folder / "smoke.json")
        assert done.status == 0, done.told
        assert "Save with 96 % unchanged" in done.printed
        assert not list(place.iterdir())

    return made_once(tmp_path_factory, "smoke", run) / "smoke.json"


def rows_of(results: Path, scenario: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows by group, who and what."""
    report = json.loads(results.read_bytes())
    found = next(one for one in report["scenarios"] if one["name"] == scenario)
    return {(row["group"], row["who"], row["what"]): row for row in found["rows"]}


def test_a_smoke_run_has_all_cells(smoke: Path) -> None:
    saves, loads = rows_of(smoke, "frozen"), rows_of(smoke, "partial")
    assert set(saves) == {
        ("", "casckpt", ""),
        ("", "casckpt", "frozen= declared"),
        ("", "safetensors", "way=file"),
        ("", "before", ""),
        ("", "raw BLAKE3", "all cores"),
        ("", "raw direct write of what changed", "2 writers"),
        ("", "raw direct write of what changed", "4 writers"),
    }
    assert {who for group, who, _ in loads if group == "warm"} == {
        "casckpt",
        "before",
        "safetensors",
        "raw read",
        "read and BLAKE3",
    }
    measured = [row for key, row in (saves | loads).items() if key[0] != "cold"]  # which not every disk can do
    assert [row["note"] for row in measured if row["note"]] == []
    assert {len(row["rounds"]) for row in measured} == {ROUNDS}
    assert all(set(row["summary"]) >= METRICS for row in measured)
    assert all(one["durable"] > 0 for row in measured for one in row["rounds"])


def test_targets_and_ratios_stand_beside_the_rows(smoke: Path) -> None:
    report = json.loads(smoke.read_bytes())
    frozen = next(one for one in report["scenarios"] if one["name"] == "frozen")
    assert {ratio["peer"] for ratio in frozen["ratios"]} >= {"safetensors, way=file", "raw BLAKE3, all cores"}
    written = next(check for check in frozen["checks"] if "blob bytes" in check["text"])
    assert 1.0 <= written["value"] <= 1.02  # counted, not timed


def test_the_description_of_the_machine_names_neither_host_nor_place(smoke: Path) -> None:
    machine = json.loads(smoke.read_bytes())["machine"]
    assert {"cpu", "cores", "memory", "file system", "kernel", "python", "torch"} <= set(machine)
    assert not any(word in json.dumps(machine) for word in ("/", os.uname().nodename))


def test_earlier_results_are_drawn_and_put_into_a_page(smoke: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: begin -->\nstale\n<!-- results: end -->\nafter\n")
    done = bench("--from", smoke, "--markdown", page, "--plot", tmp_path / "plots")
    assert done.status == 0, done.told
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"frozen.svg", "partial.svg"}
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert "| casckpt, frozen= declared |" in text


def test_what_nobody_offers_is_refused() -> None:
    for arguments in (["nothing"], ["save", "--peers", "nobody"], ["save", "--size", "much"], ["save", "--from", "x"]):
        done = bench(*arguments)
        assert done.status == 2
        assert "error" in done.told


def test_wrong_bytes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.harness import Case, Void, run_rounds
    from benchmarks.measure import Measured
    from benchmarks.results import Row
    from benchmarks.teams import CallFailed

    def fail(kind: str) -> Case:
        def run(_: int) -> Measured:
            raise CallFailed(kind, "why")

        return Case(Row("", "peer", ""), run)

    rows = run_rounds([fail("RuntimeError")], 1, lambda text: None)
    assert rows[0].note == "failed: RuntimeError: why"
    with pytest.raises(Void):
        run_rounds([fail("WrongBytes")], 1, lambda text: None)


def test_rounds_are_rotated_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.harness import Case, run_rounds
    from benchmarks.measure import Measured
    from benchmarks.results import Row

    order: list[str] = []

    def case(name: str) -> Case:
        def run(number: int) -> Measured:
            order.append(f"{name}{number}")
            return Measured(durable=1.0 + number)

        return Case(Row("", name, ""), run)

    rows = run_rounds([case("a"), case("b"), case("c")], 2, lambda text: None)
    assert order == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert [row.values("durable") for row in rows] == [[2.0, 3.0]] * 3


def test_a_case_may_have_enough_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.harness import Case, Enough, run_rounds
    from benchmarks.measure import Measured
    from benchmarks.results import Row

    def once(number: int) -> Measured:
        if number:
            raise Enough
        return Measured(blocked=1.0, durable=1.0)

    row = run_rounds([Case(Row("", "peer", ""), once)], 3, lambda text: None, warm_up=0)[0]
    assert (len(row.rounds), row.note, row.summary["durable"].median) == (1, "", 1.0)


def test_a_manifest_is_planned_with_the_bytes_that_are_wanted(tmp_path: Path) -> None:
    results = tmp_path / "manifest.json"
    done = bench("manifest", "--quick", "--dir", tmp_path, "--json", results)
    assert done.status == 0, done.told
    rows = rows_of(results, "manifest")
    assert [what for _, _, what in rows] == ["encode", "decode", "plan of one of 8 ranks", "a part for one of 20 ranks"]
    assert {len(row["rounds"]) for row in rows.values()} == {ROUNDS}


@pytest.mark.soak
def test_a_bucket_is_measured_beside_a_raw_client(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    done = bench("s3", "--quick", "--dir", tmp_path / "work", "--json", tmp_path / "s3.json")
    assert done.status == 0, done.told
    rows = rows_of(tmp_path / "s3.json", "s3")
    measured = {(group, who) for (group, who, _), row in rows.items() if row["rounds"]}
    assert measured >= {(group, who) for group in ("save", "load") for who in ("casckpt", "s3fs")}
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.soak
def test_states_of_a_training_are_coded_and_decoded(tmp_path: Path) -> None:
    """The trace is made in the first scenario, and found in the second."""
    results, traces = tmp_path / "deltas.json", tmp_path / "traces"
    done = bench("deltas", "coding", "coded", "--quick", "--dir", tmp_path, "--json", results, "--traces", traces)
    assert done.status == 0, done.told
    assert [path.name for path in traces.iterdir()] == ["quick"]
    sizes, speeds = rows_of(results, "deltas"), rows_of(results, "coding")
    stored = {key: row["summary"]["share"]["median"] for key, row in sizes.items() if row["rounds"]}
    for group in ("versions of RL", "smoke run: weights, 1 step apart", "smoke run: master alone"):
        ours, theirs = ((min(share for (at, who, _), share in stored.items() if (at, who) == (group, name)))
                        for name in ("casckpt", "zstd-1"))  # fmt: skip
        assert ours < theirs < 1
    assert {share for (_, who, _), share in stored.items() if who == "raw"} == {1.0}
    assert {group for group, who, _ in speeds if who == "casckpt"} == {
        f"{work} {kind}" for work in ("encode", "decode") for kind in ("alone", "delta")
    }
    saved = {(group, what): row["rounds"][0]["stored"] for (group, _, what), row in rows_of(results, "coded").items()}
    assert saved["versions of RL, a folder", "auto"] < saved["versions of RL, a folder", "off"] / 2
    assert saved["noise, a folder", "auto"] == saved["noise, a folder", "off"]


@pytest.mark.soak
def test_a_reader_follows_a_run_beside_full_loads(tmp_path: Path) -> None:
    results = tmp_path / "update.json"
    done = bench("update", "--quick", "--dir", tmp_path / "work", "--json", results, "--traces", tmp_path / "traces")
    assert done.status == 0, done.told
    rows = rows_of(results, "update")
    measured = {(group, what) for (group, _, what), row in rows.items() if row["rounds"]}
    moves = ("by one step", "a load of all", "hash and decode")
    assert measured == {(where, what) for where in ("a folder", "a bucket, 300 MB/s") for what in moves}
    one = rows["a bucket, 300 MB/s", "casckpt", "by one step"]["summary"]
    assert one["worst/delta"]["median"] <= 1.1  # counted, not timed


def test_a_trace_replays_what_its_training_made(tmp_path: Path) -> None:
    from benchmarks.traces import find
    from benchmarks.training import trace

    made = trace(tmp_path, "quick")
    found = find(tmp_path, "quick")
    assert found is not None
    assert found.index == made.index
    assert found.index.run is not None
    first, last = found.index.run
    seen = {step: weights.copy() for step, weights in found.versions()}
    assert list(seen) == list(range(first, last + 1))
    assert all((seen[step] == found.part(step, "weights")).all() for step in found.index.steps)
    assert 0 < (seen[first] != seen[first + 1]).mean() < 1
    with pytest.raises(ValueError, match="no master at step 99"):
        found.part(99, "master")


@pytest.mark.soak
def test_a_save_does_not_pay_for_history(tmp_path: Path) -> None:
    """What it asks of the storage, exactly: after 100 saves of its run, and after 300. Names that are listed count."""
    results = tmp_path / "history.json"
    done = bench("history", "--quick", "--dir", tmp_path, "--json", results)
    assert done.status == 0, done.told
    asked = {
        (group, what): {tuple(one["extra"][name] for name in ("requests", "names", "nbytes")) for one in row["rounds"]}
        for (group, _, what), row in rows_of(results, "history").items()
    }
    saves = {
        "": 14,
        ", another writer's clock is 10 minutes ahead": 16,  # whose announcement is read, and what comes next
        ", old commits copied": 34,  # 20 of them
        ", one restored": 16,
    }
    ahead = {"bucket": {", another writer's clock is 10 minutes ahead": 1, ", old commits copied": 2}}  # at a time
    for group in ("folder", "bucket"):
        for what, requests in saves.items():
            wanted = {(requests + ahead.get(group, {}).get(what, 0), 0, 0)}
            assert asked.pop((group, f"save 101{what}")) == asked.pop((group, f"save 301{what}")) == wanted
        (latest,) = asked.pop((group, "latest on a new host, under 300 commits of other runs"))
        assert latest[:2] == (6, 2)
    assert not asked


@pytest.mark.parametrize("scenarios", [[], ["save", "frozen"]])
def test_on_a_gpu_are_only_the_states_of_some_scenarios(
    scenarios: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*scenarios, "--device", "cuda"])
    assert "--device cuda is for save, async, load, small" in capsys.readouterr().err


def test_states_in_the_hosts_memory_are_made_as_an_earlier_tree_makes_them(tmp_path: Path) -> None:
    """Its tasks run with ``--before``, and know of no device."""
    given: list[dict[str, Any]] = []

    class Told:
        broken = False

        def call(self, task: str, **arguments: Any) -> list[int]:
            given.append(arguments)
            return [1]

    told: Any = Told()
    for device in ("cpu", "cuda"):
        bench = Bench(Options(tmp_path, [], 1, 2, device=device), _teams={("", 1): told})
        bench.make_state("state", "model", 1)
    assert ["device" in one for one in given] == [False, True]
