"""The documentation matches the code: examples run, and names, fields, defaults and limits agree."""

from __future__ import annotations

import pkgutil
import re
import subprocess
from contextlib import chdir
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import page_tables
import pytest
import torch

from casckpt.base import names
from casckpt.format import blob, dtypes, manifest, metrics, plain, plain_codecs, plain_numpy, records, regions, tree
from casckpt.format.sections import blobs as blob_section
from casckpt.format.sections import head, index, pieces, tables
from casckpt.format.sections import health as health_section
from tests.support.pages import Block, Reader, blocks, blocks_below, commands_in
from tests.support.ranks import Pool
from tests.support.torch_versions import has_torch

if TYPE_CHECKING:
    from tests.support.servers import Server

ROOT = Path(__file__).resolve().parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "casckpt"
FORMAT = (DOCS / "format.md").read_text()
DESIGN = DOCS / "design.md"
PAGES = [ROOT / "README.md",
         *(DOCS / f"{name}.md" for name in (
             "index", "tutorial", "questions", "guide", "ranks", "training", "resume", "train_state", "dcp",
             "megatron", "howto",
             "follow", "files", "coming_from", "running", "retention", "disk_usage", "copies", "damage", "hosts",
             "integrity",
         )),
         *(path for path in sorted((DOCS / "api").glob("*.md")) if blocks(path))]  # fmt: skip
REMOTE = DOCS / "remote.md"  # its examples need a server
HUB = DOCS / "huggingface.md"  # its examples need Transformers; tests/frontends/test_huggingface.py runs them
SERVING = DOCS / "serving.md"  # its examples do too; tests/frontends/serve/test_clients.py runs them
EVERY_PAGE = [
    *(page for page in sorted(DOCS.rglob("*.md")) if not {"_api", "_benchmarks"} & {*page.parts}),
    *sorted(ROOT.glob("*.md")),
]
LAYERS = {
    "package", "base", "cli", "contents", "format", "frontends", "history", "loading", "plan", "ranks", "repository",
    "saving", "storage", "store", "tensors", "upkeep",
}  # fmt: skip
STRUCTS = (
    records.Marker, records.Settings, records.Process, records.Began, records.SignOfLife, records.Committed,
    records.RevokedRecord, records.Forgotten, records.Restored, records.Purged, records.TagRecord, records.DamageRecord,
    records.LeaseRecord, records.Kept, records.Announced, records.Ran, records.Rewritten, records.Back,
    records.Trimmed, records.TaggedRecord,
    index.ManifestBody, index.EntryColumns, index.ObjectColumns, manifest.PlacesSection, blob_section.BlobColumns,
    pieces.Pieces, tables.CellSpans, records.Health, health_section.HealthColumns,
)  # fmt: skip


def section(title: str) -> str:
    """Return the text under a heading of the format page."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", FORMAT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def quoted(text: str) -> set[str]:
    """Return all strings in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_stored_field_is_described_on_the_format_page(struct: type[msgspec.Struct]) -> None:
    config = struct.__struct_config__
    assert set(struct.__struct_encode_fields__) <= quoted(FORMAT)
    assert not isinstance(config.tag, str) or config.tag in quoted(section("Records"))


def test_every_dtype_is_documented_with_its_stored_name() -> None:
    text = section("Dtypes").replace("\n  ", " ")
    text = text.replace("`int1` to `int7`", " ".join(f"`int{n}`" for n in range(1, 8)))
    text = text.replace("`uint1` to `uint7`", " ".join(f"`uint{n}`" for n in range(1, 8)))
    found: dict[str, str] = {}
    for item in text.split("\n\n")[1].split("\n- "):
        names, stored = (re.findall(r"`(\w+)`", part) for part in item.split(": "))
        found.update(zip(names, stored * (len(names) if len(stored) == 1 else 1), strict=True))
    assert found == {name: dtypes.stored_name(name) for name in dtypes.DTYPES}


def test_every_plain_data_tag_is_documented() -> None:
    codecs = (*plain_codecs.STANDARD, *plain_numpy.NUMPY)
    tags = "".join(re.findall(r"^- (.*?): ", section("Plain data"), re.MULTILINE))
    assert quoted(tags) == {codec.tag for codec in codecs} | {plain._PART}


def test_every_tree_container_is_documented() -> None:
    kinds = re.search(r"Its containers are (.*?), and", section("Trees"), re.DOTALL)
    assert kinds
    assert quoted(kinds[1]) == {kind.__name__ for kind in (*tree._MAPPINGS, *tree._SEQUENCES)}
    text = " ".join(section("Trees").split())
    assert f"with {tree.TENSOR} in place of each tensor and {tree.OBJECT} in place of each object" in text


def test_documented_limits_match_the_code() -> None:
    assert records.MAX_RECORD_BYTES == 2**20
    assert metrics.MAX_METADATA_BYTES == 65536
    flat = " ".join(FORMAT.split())
    assert f"at most {names.MAX_METRICS} names (1 to {names.MAX_METRIC_NAME} characters" in flat
    assert head.MAX_MANIFEST_BYTES == 2**32
    assert names.MAX_STEP == 2**63 - 1
    assert regions.MAX_ELEMENTS == 2**62
    text = section("Limits")
    for limit in (
        f"{index.MAX_KEY_CHARACTERS} characters",
        f"dimensions of a tensor: {regions.MAX_DIMENSIONS};",
        f"depth of plain data: {plain.MAX_DEPTH}\n",
    ):
        assert limit in text
    assert f"from byte {blob.DATA_OFFSET}" in flat
    assert f"the {blob.MAX_RUNS} that fit" in flat


# all pages


def test_every_link_in_the_docs_has_a_target() -> None:
    for page in EVERY_PAGE:
        text = page_tables.inserted(page.read_text()) if page.name == "settings.md" else page.read_text()
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


OUTSIDE = {
    "https://docs.pypi.org/trusted-publishers/",
    "https://filesystem-spec.readthedocs.io", "https://pytorch.org/get-started/locally/", "https://s3fs.readthedocs.io",
}  # fmt: skip
"""All links to other sites. Check them by hand when this list changes, because tests do not have network access."""


def test_links_to_other_sites_are_listed() -> None:
    found = {link for page in EVERY_PAGE for link in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+://[^>]*)>", page.read_text())}
    assert {one or other for one, other in found} == OUTSIDE
    assert all(re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", link) for link in OUTSIDE)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_heading_levels_have_no_gaps() -> None:
    """The site treats such a warning as an error."""
    for page in EVERY_PAGE:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        levels = [len(found) for found in re.findall(r"^(#+) ", text, re.MULTILINE)]
        assert all(after <= before + 1 for before, after in pairwise([0, *levels])), page


def test_the_examples_on_all_pages_are_run() -> None:
    for page in EVERY_PAGE:
        assert page in (*PAGES, REMOTE, HUB, SERVING) or not blocks(page), f"{page.name} has examples: add it to PAGES"


# docs/reliability.md

TRIED = {  # row of the summary -> rows of the evidence that it sums up
    "checked states of the protocol models": r"checked states of the protocol models",
    "processes killed at a chosen call": r"SIGKILL right|processes that die right",
    "processes stopped at a chosen call, then continued after others": r"processes stopped",
    "calls and requests that failed, or were lost, truncated, delayed, throttled or refused": (
        r"changes of the storage without|calls that failed|.*requests\b|truncated answers"
    ),
    "power losses that keep none, some or all names not yet durable": r"power losses",
    "randomly changed bytes and files for decoders and importers": r"randomly changed",
    "planted bugs that the default test run detects": r"planted bugs",
}


def test_the_summary_claims_only_what_the_evidence_supports() -> None:
    text = (DOCS / "reliability.md").read_text()
    counted = re.findall(r"^\| (.*?) \| ([\d,]+) \|", text, re.MULTILINE)
    said = dict(re.findall(r"^\| (.*?) \| more than ([\d,]+) \|", text, re.MULTILINE))
    assert said.keys() == TRIED.keys()
    for name, pattern in TRIED.items():
        found = sum(int(count.replace(",", "")) for row, count in counted if re.match(pattern, row))
        assert 0 < int(said[name].replace(",", "")) <= found, f"{name}: {found}"


# the pages with examples


def test_the_wrapper_for_cron_keeps_the_last_good_output_and_prints_only_failures(tmp_path: Path) -> None:
    (create, _), *_ = commands_in(blocks_below(DOCS / "running.md", "Cron", "console")[0])
    subprocess.run(["bash", "-ec", create], cwd=tmp_path, check=True)
    for said, status, printed, kept in (
        ("good", 0, "", "good"),
        ("bad", 4, "exit status 4: sh -c echo bad; echo why >&2; exit 4\nwhy\nbad\n", "good"),
        ("new", 0, "", "new"),
    ):
        job = f"echo {said}; echo why >&2; exit {status}"
        command = ["bin/nightly", "last/job.json", "sh", "-c", job]
        done = subprocess.run(command, cwd=tmp_path, stdout=-1, stderr=-2, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, printed)
        assert (tmp_path / "last/job.json").read_text() == f"{kept}\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # a single process saves with DCP here
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_every_example_works_as_documented(page: Path, tmp_path: Path, ranks: Pool) -> None:
    if page == DOCS / "api" / "dcp.md" and not has_torch("2.7"):
        pytest.skip("torch 2.7 added no_dist")
    folder = tmp_path / "page"
    folder.mkdir()
    reader = Reader(folder, ROOT, model_and_optimizer(), lambda size, block: ranks.run(size, on_rank, block, folder))
    assert reader.follow(page)


def test_every_example_on_buckets_works_as_documented(
    tmp_path: Path, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials come from the environment, as the page says."""
    moto_server.client.create_bucket(Bucket="my-bucket")
    options = moto_server.options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", options["endpoint_url"])
    assert Reader(tmp_path, ROOT, {}, lambda size, block: None).follow(REMOTE) >= 5


def model_and_optimizer() -> dict[str, object]:
    """Return the model and optimizer in the README's examples. Other pages create their own."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters()), "train_step": train_step}


def train_step(model: torch.nn.Module, optim: torch.optim.Optimizer) -> float:
    optim.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optim.step()
    return float(loss.item())


def on_rank(rank: int, size: int, block: Block, folder: Path) -> None:
    torch.manual_seed(0)  # pool ranks have drawn different numbers; torchrun's start equal
    with chdir(folder):
        block.run_python({})


# docs/design.md


def test_the_site_lists_the_modules_of_every_layer() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[:1] for path in PACKAGE.rglob("*.py")}
    assert {part[0] if part else "package" for part in folders} == LAYERS
    text = DESIGN.read_text()
    assert sorted(re.findall(r"<!-- modules: (\w+) -->", text)) == sorted(LAYERS)
    text = page_tables.inserted(text.replace("<!-- private names -->", ""))  # tests/test_private_names.py checks these
    rows = set(re.findall(r"^\| `([\w/.]+)` \| \S.* \|$", text, re.MULTILINE))
    assert rows >= {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


def test_files_named_in_the_docs_exist() -> None:
    for page in (DESIGN, *sorted((DOCS / "decisions").glob("0*.md"))):
        for name in re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|md))`", page.read_text()):
            assert any((folder / name).exists() for folder in (ROOT, PACKAGE, DOCS)), f"{page.name} names {name}"


def named_in_the_code() -> dict[str, Path]:
    """Return full names in docstrings that refer to casckpt, with a module that has each."""
    names: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"(?<!`)`(casckpt(?:\.\w+)+)`(?!`)", path.read_text()):
            names.setdefault(name, path.relative_to(ROOT))
    return names


@pytest.mark.process  # front ends import matplotlib, which lists the fonts of the system
def test_references_in_docstrings_exist() -> None:
    broken = []
    for name, path in named_in_the_code().items():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            broken.append(f"{path}: {name}")
    assert broken == []


# docs/glossary.md


def test_the_glossary_is_short_and_each_word_has_a_module() -> None:
    page = (DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| \*\*([\w ]+)\*\* \| .* \| `([\w.]+)` \|$", page, re.MULTILINE)
    words = [word for word, _ in rows]
    assert len(words) == len(set(words))
    assert 30 < len(words) <= 36
    assert [home for _, home in rows if find_spec(home) is None] == []


# docs/decisions


def test_decisions_are_listed_and_short_and_have_a_status() -> None:
    in_force, replaced = (DOCS / "decisions" / "README.md").read_text().split("\n## Replaced\n")
    pages = sorted(path for path in (DOCS / "decisions").glob("*.md") if path.name != "README.md")
    numbers = [path.name[:4] for path in pages] + re.findall(r"(\d{4})\s(?:by|withdrawn)", replaced)
    assert sorted(numbers) == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    assert set(re.findall(r"by\s(\d{4})", replaced)) <= {path.name[:4] for path in pages}
    assert len(pages) <= 40
    for path in pages:
        text = path.read_text()
        title, *sections = re.findall(r"^#+ .*$", text, re.MULTILINE)
        version = re.search(r"^Status: in force since (\d+\.\d+\.\d+)\.$", text, re.MULTILINE)
        assert version, path.name
        assert (
            f"| [{path.name[:4]}]({path.name}) | {title.removeprefix(f'# {path.name[:4]}: ')} | {version[1]} |"
            in in_force
        )
        assert sections == ["## Problem", "## Choice", "## Rejected", "## Consequence"], path.name
        assert len(text.split()) < 320, path.name
