"""Marks, fixed seeds (``--full``: seeds of the day), a cache folder, and stores for all tests."""

from __future__ import annotations

import gc
import secrets
import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import elsewhere, kinds, workers
from tests.support.afresh import collect_less, share_fork_server

if TYPE_CHECKING:
    import casckpt
    from tests.support.ranks import Pool
    from tests.support.servers import Server

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, print_blob=True)
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=20, print_blob=True)
settings.register_profile("bucket", derandomize=True, deadline=None, max_examples=6, print_blob=True)
settings.register_profile("full", deadline=None, max_examples=1000, print_blob=True)


LONGER = 6
"""So much longer may a test take with --full, and a job of ranks."""


_paused_when_idle: list[Server] = []  # SeaweedFS with many buckets uses a tenth of a core even without requests


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(workers)
    parser.addoption(
        "--quick", action="store_true", help="what is plain and no sweep: no ranks, no servers, no other processes"
    )
    parser.addoption("--full", action="store_true", help="long sweeps (the mark soak) too, with new random seeds")
    points = "with --full: at so many calls of each kind is somebody struck in a bucket (10); 0: at all, for hours"
    parser.addoption("--points", type=int, default=10, help=points)
    where = "the suites of repositories and checkpoints alone, their stores in buckets of this server"
    lazyfs = "with --full: a checkout of LazyFS in which it was built, for tests/store/test_fault_tools.py"
    parser.addoption("--lazyfs", type=Path, metavar="CHECKOUT", help=lazyfs)
    parser.addoption("--storage", choices=elsewhere.SERVERS, help=where)


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own options
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # during collection: modules and tests are not garbage
    full = config.getoption("--full")
    if full and config.getoption("--quick"):
        raise pytest.UsageError("--quick and --full exclude each other")
    for kind, needs in (kinds.KINDS | kinds.FAULT).items():
        config.addinivalue_line("markers", f"{kind}: set by what the test reaches: {needs}")
    if config.getoption("--hypothesis-profile") is None:
        quick = "quick" if config.getoption("--quick") else "ci"
        settings.load_profile("bucket" if config.getoption("--storage") else "full" if full else quick)
    if full and config.getoption("timeout") is None:
        config.option.timeout = LONGER * float(config.getini("timeout"))
    if full and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(secrets.randbelow(1 << 32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seeds: {_repeat(config)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--storage``, pytest collects only modules whose stores use that storage."""
    if not config.getoption("--storage") or collection_path.suffix != ".py":
        return None
    return str(collection_path.relative_to(config.rootpath)) not in elsewhere.MODULES or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for kind in kinds.kinds_of(item):
            item.add_marker(kind)
    left_out = [item for item in items if not _wanted(config, item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if _wanted(config, item)]


def pytest_collection_finish() -> None:
    collect_less()
    gc.enable()


def _wanted(config: pytest.Config, item: pytest.Item) -> bool:
    if item.get_closest_marker("soak") and not config.getoption("--full"):
        return False
    if config.getoption("--quick") and not (_is_plain(item) and item.get_closest_marker("sweep") is None):
        return False
    if not config.getoption("--storage"):
        return True
    return item.nodeid.partition("::")[0] in elsewhere.MODULES and not item.get_closest_marker("in_memory")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """The catalogues of tests are in a temporary folder, even in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        cache: Path = session.config._tmp_path_factory.mktemp("cache")  # type: ignore[attr-defined]
        patch.setenv("XDG_CACHE_HOME", str(cache))
        if session.config.getoption("--workers") and not session.config.getoption("--quick"):
            share_fork_server(cache.with_name("fork-server.log"))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for server in _paused_when_idle:
        server.pause(paused=item.get_closest_marker("server") is None)


def _is_plain(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(kind) for kind in kinds.KINDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with kinds.on_its_own(item) if _is_plain(item) else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seeds", _repeat(item.config)))
    return report


def _repeat(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return "fixed" if seed is None else f"repeat with --hypothesis-seed={seed}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for random draws without Hypothesis. It differs per test and is the same in each run."""
    base = request.config.getoption("--hypothesis-seed") or 0
    return zlib.crc32(f"{base} {request.node.nodeid}".encode())


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the test tools do not count as evidence."""
    monkeypatch.delenv("CASCKPT_TALLY", raising=False)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Report whether ``--full`` was given, for tests that then sweep further."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Return a new folder on the disk, even if `tools/test` keeps the files of tests in memory."""
    with TemporaryDirectory(prefix="casckpt-test-") as folder:
        yield Path(folder)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """A path at which no store exists yet."""
    return tmp_path / "store"


@pytest.fixture
def store(store_path: Path) -> casckpt.Store:
    """A store in a folder that does not exist. The first save creates it."""
    import casckpt

    return casckpt.open(store_path)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes that form process groups."""
    from tests.support.ranks import PATIENCE, Pool

    patience = PATIENCE * (LONGER if request.config.getoption("--full") else 1)
    with Pool(tmp_path_factory.mktemp("ranks"), patience) as pool:
        yield pool


@pytest.fixture(scope="session", autouse=True)
def _where_stores_lie(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stores are in memory, unless ``--storage`` names a different storage."""
    name = request.config.getoption("--storage")
    if name is None:
        yield
        return
    with elsewhere.stores_in(request.getfixturevalue(f"{name}_server")):
        yield


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fast emulator of S3."""
    from tests.support import servers

    with servers.running(servers.moto(tmp_path_factory.mktemp("moto"))) as server:
        yield server


@pytest.fixture(scope="session")
def seaweed_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server that speaks S3. It pauses during tests without a server, unless all tests store in it."""
    from tests.support import servers

    with servers.running(servers.seaweed(tmp_path_factory.mktemp("seaweed"))) as server:
        if not request.config.getoption("--storage"):
            _paused_when_idle.append(server)
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server that ignores the condition for exclusive puts."""
    from tests.support import servers

    with servers.running(servers.rclone(tmp_path_factory.mktemp("rclone"))) as server:
        yield server
