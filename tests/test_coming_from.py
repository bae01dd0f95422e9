"""The examples in docs/coming_from.md, before and after. Each library runs in a separate process.

tests/test_docs.py runs the examples that need no other library, or DCP on two ranks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.pages import blocks
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coming_from.md"
HERE = {
    "Lightning": "lightning",
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "torchtitan": "torchtitan",
    "Megatron-core": "megatron",
}
ELSEWHERE = {
    "torch.save": "test_docs.py runs it",
    "safetensors": "test_docs.py runs it",
    "torch.distributed.checkpoint": "test_docs.py runs it, on two ranks",
    "OLMo-core": "not among what tests install: tools/bench makes it an environment of its own; "
    "interchange/test_torch_files.py imports folders as it writes them",
    "Orbax": "needs JAX, which casckpt has no other use for",
}
"""Why a section is not run here. For Megatron-core, the "before" part needs a GPU; casckpt gets one of its folders."""


def test_each_section_of_the_page_is_run_or_states_why_it_is_not() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert sections == ["torch.save", "safetensors", "torch.distributed.checkpoint", *HERE, "OLMo-core", "Orbax",
                        "Intentional differences"]  # fmt: skip
    assert sections[:-1] == [*list(ELSEWHERE)[:3], *HERE, *list(ELSEWHERE)[3:]]
    assert {block.needs for block in blocks(PAGE)} == {"", *HERE.values()}


@pytest.mark.process
@pytest.mark.parametrize("package", HERE.values())
def test_examples_before_and_after_work_as_documented(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    folder = tmp_path / "page"
    shutil.copytree(ROOT / "tests" / "data" / "torch_dist", folder / "ckpt" / "iter_0000100")
    quiet = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_script("tests.support.pages", str(PAGE), package, cwd=folder, environment=quiet)
    assert done.status == 0, done.told
