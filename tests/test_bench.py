"""tools/bench runs, and its results have the expected content. The tests do not check the figures."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main
from benchmarks.environments import Absent, version_of
from benchmarks.measure import Measured
from benchmarks.results import (
    OURS,
    RUNS,
    TO_OURS,
    Check,
    Report,
    Row,
    ScenarioResult,
    Spread,
    ratios,
    read_json,
    write_json,
)
from benchmarks.scenarios import SCENARIOS
from benchmarks.scenarios.base import Bench, Options
from benchmarks.show import cells, markdown
from benchmarks.tasks import limits
from benchmarks.worker import Here
from tests.support.scripts import Done, run_script
from tests.support.shared import made_once

ROOT = Path(__file__).resolve().parent.parent
METRICS = {"blocked", "durable", "cpu", "written", "read", "asked", "stored", "load_average"}
ROUNDS = 2
PAGE = ROOT / "docs" / "benchmarks.md"
PUBLISHED = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
MAX_PUBLISHED = 500_000  # bytes


def bench(*arguments: str | Path) -> Done:
    """Return tools/bench as a module, with the environments that exist."""
    return run_script("benchmarks", *arguments, environment={"PYTHONPATH": str(ROOT / "tools")})


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The results of a smoke run, which leaves no other files. With --full, it includes an earlier tree."""
    before = ("--before", ROOT) if request.config.getoption("--full") else ()

    def run(folder: Path) -> None:
        place = folder / "place"
        place.mkdir()
        asked = ("frozen", "partial", "--quick", "--peers", "safetensors", *before)
        done = bench(*asked, "--dir", place, "--json", folder / "smoke.json")
        assert done.status == 0, done.told
        assert "Save with 96 % unchanged" in done.printed
        assert not list(place.iterdir())

    return made_once(tmp_path_factory, "smoke", run) / "smoke.json"


def rows_of(results: Path, scenario: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows by group, participant and settings."""
    report = json.loads(results.read_bytes())
    found = next(one for one in report["scenarios"] if one["name"] == scenario)
    return {(row["group"], row["who"], row["what"]): row for row in found["rows"]}


def test_a_smoke_run_of_the_benchmarks_fills_the_whole_table(smoke: Path, full: bool) -> None:
    saves, loads = rows_of(smoke, "frozen"), rows_of(smoke, "partial")
    before = {"before"} if full else set[str]()
    assert set(saves) == {
        ("", "casckpt", ""),
        ("", "casckpt", "frozen= declared"),
        ("", "safetensors", "way=file"),
        *(("", who, "") for who in before),
        ("", "raw BLAKE3", "all cores"),
        ("", "raw direct write of what changed", "2 writers"),
        ("", "raw direct write of what changed", "4 writers"),
    }
    assert {who for group, who, _ in loads if group == "warm"} == {
        "casckpt",
        *before,
        "safetensors",
        "raw read",
        "read and BLAKE3",
    }
    measured = [row for key, row in (saves | loads).items() if key[0] != "cold"]  # some disks cannot do this
    assert [row["note"] for row in measured if row["note"]] == []
    assert {len(row["rounds"]) for row in measured} == {ROUNDS}
    assert all(set(row["summary"]) >= METRICS for row in measured)
    assert all(one["durable"] > 0 for row in measured for one in row["rounds"])


def test_the_rows_of_results_show_targets_and_ratios(smoke: Path) -> None:
    report = json.loads(smoke.read_bytes())
    frozen = next(one for one in report["scenarios"] if one["name"] == "frozen")
    assert {ratio["peer"] for ratio in frozen["ratios"]} >= {"safetensors, way=file", "raw BLAKE3, all cores"}
    written = next(check for check in frozen["checks"] if "blob bytes" in check["text"])
    assert 1.0 <= written["value"] <= 1.02  # counted, not timed


def test_the_machine_description_names_neither_host_nor_location(smoke: Path) -> None:
    report = json.loads(smoke.read_bytes())
    machine = report["machine"]
    assert all(re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", one["commit"]) for one in report["scenarios"])
    assert {"cpu", "cores", "memory", "file system", "kernel", "python", "torch"} <= set(machine)
    assert not any(word in json.dumps(machine) for word in ("/", os.uname().nodename))


def test_earlier_results_are_plotted_and_published(smoke: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    done = bench("--from", smoke, "--json", published / "smoke.json", "--no-rounds", "--plot", tmp_path / "plots")
    assert done.status == 0, done.told
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"frozen.svg", "partial.svg"}
    had, has = (read_json([path]) for path in (smoke, published / "smoke.json"))
    rows = [row for one in has.scenarios for row in one.rows]
    assert [row.summary for row in rows] == [row.summary for one in had.scenarios for row in one.rows]
    assert not any(row.rounds for row in rows)
    assert markdown.render(has) == markdown.render(had)
    markdown.write_pages(published, tmp_path / "pages")
    text = (tmp_path / "pages" / "smoke.md").read_text()
    assert "\n## frozen: Save with 96 % unchanged\n" in text
    assert "\n| casckpt, frozen= declared |" in text


def a_run(ours: float, peers: dict[str, float], **more: int) -> ScenarioResult:
    """The results of a run with one round: the times of casckpt and of the settings of a peer."""
    rows = [Row("", OURS, "", rounds=[Measured(durable=ours)])]
    rows += [Row("", "peer", what, rounds=[Measured(durable=time)]) for what, time in peers.items()]
    rows.append(Row("", "disk", "", limit=True, rounds=[Measured(durable=0.5)]))
    for row in rows:
        row.summarise()
    check = Check("peer / casckpt", 1.0, True, min(peers.values()) / ours)
    return ScenarioResult("save", "Save", "durable", {"bytes": 1, **more}, rows, ratios(rows, "durable"), [check])


@pytest.fixture
def three_runs(tmp_path: Path) -> list[Path]:
    """Results on three days, in the last of which casckpt is slower than its peer."""
    runs = (a_run(1.0, {"a": 2.0, "b": 3.0}), a_run(1.0, {"a": 4.0, "b": 3.0}), a_run(2.0, {"a": 1.0, "b": 8.0}))
    for day, run in enumerate(runs):
        run.commit = "abc"
        write_json(Report({"date": f"day {day}", "cpu": "one"}, [run]), tmp_path / f"{day}.json", rounds=False)
    return [tmp_path / f"{day}.json" for day in range(3)]


def test_runs_are_merged_into_medians_with_ranges(three_runs: list[Path], tmp_path: Path) -> None:
    done = bench("--from", *three_runs, "--json", tmp_path / "merged.json", "--no-rounds")
    assert done.status == 0, done.told
    report = read_json([tmp_path / "merged.json"])
    assert report.machine == {"date": "day 0, day 1, day 2", "cpu": "one"}
    (found,) = report.scenarios
    assert (found.parameters, found.commit) == ({"bytes": 1, "runs": 3}, "abc")
    assert {row.name: row.summary["durable"] for row in found.rows} == {
        "casckpt": Spread(1.0, 1.0, 2.0), "peer, a": Spread(2.0, 1.0, 4.0), "peer, b": Spread(3.0, 3.0, 8.0),
        "disk": Spread(0.5, 0.5, 0.5),
    }  # fmt: skip
    assert [(one.peer, one.ratio) for one in found.ratios] == [
        ("peer", Spread(2.0, 0.5, 3.0)),  # with its best setting in each run
        ("disk", Spread(0.5, 0.25, 0.5)),
    ]
    assert [check.value for check in found.checks] == [2.0]
    for shown in (done.printed, markdown.render(report)):
        assert re.search(r"peer, a .*2\.00 \(0\.50-4\.00\), the best peer", shown)
        assert re.search(r"peer, b .*3\.00 \(3\.00-4\.00\) ", shown)


def test_a_row_that_a_run_lacks_is_not_merged_from_the_others(three_runs: list[Path]) -> None:
    report = read_json(three_runs[:1])
    report.scenarios[0].rows[1].summary.clear()
    report.scenarios[0].rows[1].note = "failed: why"
    write_json(report, three_runs[0], rounds=False)
    (found,) = read_json(three_runs).scenarios
    assert found.rows[1].summary == {}
    assert found.rows[1].note == "measured in 2 of 3 runs; failed: why"
    assert found.rows[2].summary["durable"].median == 3.0


def test_runs_with_other_parameters_are_not_merged(three_runs: list[Path], tmp_path: Path) -> None:
    write_json(Report({}, [a_run(1.0, {"a": 1.0}, rounds=9)]), tmp_path / "other.json")
    done = bench("--from", three_runs[0], tmp_path / "other.json")
    assert done.status == 2
    assert "save: runs with rounds None and 9 cannot be merged" in done.told


_FIO = """#!{python}
import json, sys
given = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[1:])
size = int(given.get("size", 0)) * int(given.get("numjobs", 0))
found = {{"runtime": 2000, "io_bytes": size}}
print("fio-3.33" if "version" in given else json.dumps({{"jobs": [{{given["rw"]: found}}]}}))
"""


@pytest.mark.process
@pytest.mark.parametrize("installed", [True, False])
def test_the_limit_of_the_disk_is_that_of_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if installed:
        (programs / "fio").write_text(_FIO.format(python=sys.executable))
        (programs / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    here = Here(0, 1, "", quick=True, threads=2)
    job: dict[str, Any] = {"folder": str(tmp_path / "disk"), "size": 1000, "jobs": 2, "depth": 1, "block": 1 << 20}
    if not installed:
        with pytest.raises(Absent, match="it is not installed; on Debian and Ubuntu: apt install fio"):
            limits.fio(here, work="write", **job)
        return
    measured = limits.fio(here, work="write", **job)
    assert measured.durable == measured.blocked == 2.0 * 1000 / 8192  # it writes whole blocks
    assert version_of(str(programs / "fio")) == "3.33"


def test_an_unknown_contender_is_rejected() -> None:
    for arguments in (["nothing"], ["save", "--peers", "nobody"], ["save", "--size", "much"], ["save", "--from", "x"]):
        done = bench(*arguments)
        assert done.status == 2
        assert "error" in done.told


def test_a_benchmark_run_ends_if_loaded_bytes_are_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.harness import Case, Void, run_rounds
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


def test_contenders_rotate_between_rounds_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_slow_case_may_end_after_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_planned_manifest_has_the_requested_size(tmp_path: Path) -> None:
    results = tmp_path / "manifest.json"
    done = bench("manifest", "--quick", "--dir", tmp_path, "--json", results)
    assert done.status == 0, done.told
    rows = rows_of(results, "manifest")
    assert [what for _, _, what in rows] == ["encode", "decode", "plan of one of 8 ranks", "a part for one of 20 ranks"]
    assert {len(row["rounds"]) for row in rows.values()} == {ROUNDS}


def test_groups_of_processes_and_of_simulated_ranks_are_measured(tmp_path: Path) -> None:
    results = tmp_path / "ranks.json"
    done = bench("ranks", "--quick", "--dir", tmp_path, "--json", results)
    assert done.status == 0, done.told
    rows = rows_of(results, "ranks")
    assert {group for group, _, _ in rows} == {"3 processes", "50 simulated ranks"}
    assert {len(row["rounds"]) for row in rows.values()} == {ROUNDS}


@pytest.mark.soak
def test_a_bucket_is_measured_together_with_a_raw_client(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    done = bench("s3", "--quick", "--dir", tmp_path / "work", "--json", tmp_path / "s3.json")
    assert done.status == 0, done.told
    rows = rows_of(tmp_path / "s3.json", "s3")
    measured = {(group, who) for (group, who, _), row in rows.items() if row["rounds"]}
    assert measured >= {(group, who) for group in ("save", "load") for who in ("casckpt", "s3fs")}
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.soak
def test_hosts_share_what_they_read_from_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    done = bench("hosts", "--quick", "--dir", tmp_path / "work", "--json", tmp_path / "hosts.json")
    assert done.status == 0, done.told
    rows = rows_of(tmp_path / "hosts.json", "hosts")
    assert len(rows) == 4
    assert all(row["rounds"] or "only root" in row["note"] for row in rows.values())


@pytest.mark.soak
def test_training_states_are_encoded_and_decoded(tmp_path: Path) -> None:
    """The first scenario creates the trace, and the second one finds it."""
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
def test_a_mean_of_checkpoints_is_measured_beside_its_limit(tmp_path: Path) -> None:
    results = tmp_path / "merge.json"
    asked = ("merge", "--quick", "--size", "2M", "--before", ROOT)
    done = bench(*asked, "--dir", tmp_path / "work", "--json", results)
    assert done.status == 0, done.told
    measured = {(group, who) for (group, who, _), row in rows_of(results, "merge").items() if row["rounds"]}
    groups = ("float32, warm", "bfloat16, warm")  # a file system in memory cannot be cold
    assert measured >= {(group, who) for group in groups for who in ("casckpt", "before", "read, BLAKE3, and write")}


@pytest.mark.soak
def test_a_reader_follows_a_run_alongside_full_loads(tmp_path: Path) -> None:
    results = tmp_path / "update.json"
    asked = ("update", "--quick", "--before", ROOT, "--traces", tmp_path / "traces")
    done = bench(*asked, "--dir", tmp_path / "work", "--json", results)
    assert done.status == 0, done.told
    rows = rows_of(results, "update")
    measured = {key for key, row in rows.items() if row["rounds"]}
    places, moves = ("a folder", "a bucket, 300 MB/s"), ("by one step", "a load of all", "hash and decode")
    assert measured == set(product(places, ("casckpt", "before"), moves))
    one = rows["a bucket, 300 MB/s", "casckpt", "by one step"]["summary"]
    assert one["worst/delta"]["median"] <= 1.1  # counted, not timed


def test_a_replayed_trace_has_the_states_of_its_training_run(tmp_path: Path) -> None:
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
def test_the_requests_of_a_save_do_not_depend_on_the_length_of_the_history(tmp_path: Path) -> None:
    """The numbers of requests after 100 and after 300 saves of the run are equal, including the names in listings."""
    results = tmp_path / "history.json"
    done = bench("history", "--quick", "--dir", tmp_path, "--json", results)
    assert done.status == 0, done.told
    asked = {
        (group, what): {tuple(one["extra"][name] for name in ("requests", "names", "nbytes")) for one in row["rounds"]}
        for (group, _, what), row in rows_of(results, "history").items()
    }
    saves = {
        "": 14,
        ", another writer's clock is 10 minutes ahead": 16,  # whose announcement and next number it reads
        ", old commits copied": 34,  # 20 of them
        ", one restored": 16,
    }
    ahead = {"bucket": {", another writer's clock is 10 minutes ahead": 1, ", old commits copied": 2}}  # at once
    for group in ("folder", "bucket"):
        for what, requests in saves.items():
            wanted = {(requests + ahead.get(group, {}).get(what, 0), 0, 0)}
            assert asked.pop((group, f"save 101{what}")) == asked.pop((group, f"save 301{what}")) == wanted
        (latest,) = asked.pop((group, "latest on a new host, under 300 commits of other runs"))
        assert latest[:2] == (6, 2)
    assert not asked


@pytest.mark.parametrize("scenarios", [[], ["save", "frozen"]])
def test_only_some_scenarios_can_place_states_on_a_gpu(
    scenarios: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*scenarios, "--device", "cuda"])
    assert "--device cuda is for save, async, load, small" in capsys.readouterr().err


def test_host_memory_states_equal_those_from_an_earlier_tree(tmp_path: Path) -> None:
    """The earlier tree's tasks run with ``--before`` and have no device argument."""
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


def test_published_results_are_small_and_from_known_scenarios() -> None:
    assert sum(path.stat().st_size for path in PUBLISHED) < MAX_PUBLISHED
    page = PAGE.read_text()
    for path in PUBLISHED:
        assert f"](benchmarks/{path.name})" in page
        for scenario in read_json([path]).scenarios:
            assert scenario.name in SCENARIOS
            assert scenario.commit
            assert not scenario.parameters["quick"]
            assert all(row.summary or row.note for row in scenario.rows)
            assert not any(row.rounds for row in scenario.rows)


def of_casckpt() -> Iterator[tuple[str, set[str]]]:
    """Return the time of each published row of casckpt, and the ratios of its group's rows to it."""
    for scenario in read_all():
        metric = "blocked" if scenario.metric == "blocked" else "durable"
        rows = [row for row in scenario.rows if metric in row.summary]
        for ours in (row for row in rows if row.who == OURS):
            here = [row for row in rows if row.group == ours.group]
            merged = RUNS in scenario.parameters  # whose ratios are medians of ratios, with ranges
            found = [row.summary[metric].median / ours.summary[metric].median for row in here if not merged]
            spreads = [one.ratio for one in scenario.ratios
                       if (one.group, one.ours, one.metric) == (ours.group, ours.name, metric)]  # fmt: skip
            if ours is next(row for row in here if row.who == OURS):
                spreads += [row.summary[TO_OURS] for row in here if TO_OURS in row.summary]
            found += [one for spread in spreads for one in (spread.median, spread.low, spread.high)]
            yield written(ours, metric), {f"{one:.2f}" for one in found}


def read_all() -> Iterator[ScenarioResult]:
    for path in PUBLISHED:
        yield from read_json([path]).scenarios


def written(row: Row, metric: str) -> str:
    """Return the median as the pages show it."""
    return re.sub(r" \(.*\)", "", cells.seconds(row.summary[metric]))


def section(page: Path, heading: str) -> str:
    return page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def figures() -> Iterator[list[str]]:
    """Return the cells of each row in the page's tables of figures, without code spans."""
    for line in re.findall(r"^\| (.*?) \|$", section(PAGE, "Figures"), re.MULTILINE):
        yield [re.sub(r"`.*?`", "", cell) for cell in line.split(" | ")]


def test_each_ratio_on_the_page_is_in_the_results() -> None:
    """A row on the page shows casckpt's time, followed by ratios to it."""
    known = list(of_casckpt())
    rows = [row for row in figures() if len(row) > 2 and re.fullmatch(r"[\d.]+ m?s", row[1])]
    rows = [row for row in rows if not any(re.search(r"\d m?s$", cell) for cell in row[2:])]
    assert len(rows) > 20
    for _, ours, *others in rows:
        said = set(re.findall(r"\d+\.\d+", " ".join(others)))
        assert said
        assert any(time == ours and said <= ratios for time, ratios in known), f"{ours}: {said}"


def test_each_time_and_share_on_the_page_is_in_the_results() -> None:
    rows = [row for scenario in read_all() for row in scenario.rows]
    times = {written(row, metric) for row in rows for metric in ("blocked", "durable") if metric in row.summary}
    shares = {f"{row.summary['share'].median:.2%}"[:-1] for row in rows if "share" in row.summary}
    said = [cell for row in figures() for cell in row[1:]]
    found = [time for cell in said for time in re.findall(r"^[\d.]+ m?s$", cell)]
    assert len(found) > 30
    assert set(found) <= times
    percents = [one for cell in said if "%" in cell for one in re.findall(r"\d+\.\d\d", cell)]
    assert len(percents) > 15
    assert set(percents) <= shares


def test_each_missed_target_on_the_page_is_in_the_results() -> None:
    missed = {cells.target(one)[1:3] for found in read_all() for one in found.checks if one.met is False}
    rows = re.findall(r"^\| .* \| (at .*?) \| (\d.*?) \| .*\|$", section(PAGE, "Missed targets"), re.MULTILINE)
    assert len(rows) > 5
    for wanted, found in rows:
        assert {(wanted, one) for one in re.split("; | to ", found)} <= missed


def test_the_readme_figures_match_the_page() -> None:
    numbers = re.compile(r"\d+\.\d+")
    page = [float(one) for one in numbers.findall(section(PAGE, "Figures"))]
    said = numbers.findall(section(ROOT / "README.md", "Why"))
    assert len(said) >= 3
    for one in said:
        digits = len(one.partition(".")[2])
        assert any(f"{found:.{digits}f}" == one for found in page), one


_COPIES = """#!/bin/sh
case $1 in
    --version) echo borg 1.0 ;;
    init) mkdir "$BORG_REPO" ;;
    *) for source; do :; done; cp -r "$source" "$BORG_REPO" ;;
esac
"""


@pytest.mark.soak
def test_folders_are_stored_by_casckpt_and_by_the_programs_that_are_installed(tmp_path: Path) -> None:
    results, borg = tmp_path / "files.json", tmp_path / "bin" / "borg"
    borg.parent.mkdir()
    borg.write_text(_COPIES)
    borg.chmod(0o755)
    found = {"PYTHONPATH": str(ROOT / "tools"), "PATH": f"{borg.parent}{os.pathsep}{os.environ['PATH']}"}
    asked = ("files", "--quick", "--size", "2M", "--dir", tmp_path / "work", "--json", results)
    done = run_script("benchmarks", *asked, environment=found)
    assert done.status == 0, done.told
    rows = rows_of(results, "files")
    measured = {(group, who) for (group, who, _), row in rows.items() if row["rounds"]}
    always = ("casckpt", "cp -a and fsync", "borg", "read and BLAKE3")
    assert measured >= {(group, who) for group in ("first", "next") for who in always}
    assert all(row["rounds"] or row["note"] == "absent: it is not installed" for row in rows.values())
    borgs = [row for (_, who, _), row in rows.items() if who == "borg"]
    copied = [one["stored"] / row["nbytes"] for row in borgs for one in row["rounds"]]
    assert 1.0 <= min(copied) <= max(copied) < 1.1  # each version counts its own bytes only
    assert json.loads(results.read_bytes())["scenarios"][0]["parameters"]["borg"] == "1.0"
    assert not list((tmp_path / "work").iterdir())
