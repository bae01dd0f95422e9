"""vLLM and lm_eval, unchanged, load steps of a served store. vLLM replaces its weights when `follow` tells it to.

The tests compare with Transformers' own results on the same weights, and are skipped unless the packages are installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs casckpt[serve]")
pytest.importorskip("transformers", reason="needs casckpt[transformers]")

import casckpt
from casckpt.frontends.follow import Follower
from tests.support.saves import small_folder
from tests.support.servers import Server, running
from tests.support.serving import serving
from tests.test_docs import DOCS

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the engines
WORDS = ("one", "two", "six", "ten")
START_SECONDS = 1200  # vLLM imports and compiles for minutes on a busy machine
EVALUATE = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

tasks = TaskManager(include_path="task")
for where in sys.argv[1:]:
    done = simple_evaluate("hf", model_args=f"pretrained={where}", tasks=["words"], task_manager=tasks, device="cpu")
    print(json.dumps([one["filtered_resps"] for one in done["samples"]["words"]]))
"""


def tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<s>": 0, **{word: i for i, word in enumerate(WORDS, 1)}}, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, bos_token="<s>", eos_token="<s>", unk_token="<s>")


@pytest.fixture
def store(tmp_path: Path) -> casckpt.Store:
    """Return a store with two steps of a Llama that vLLM can run on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=128, num_attention_heads=2, vocab_size=97,
        max_position_embeddings=64, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    store = small_folder(tmp_path / "store")
    for step in (100, 200):
        torch.manual_seed(step)
        model = LlamaForCausalLM(config)
        files = casckpt.hub_files(model, tokenizer())
        casckpt.save_model_and_optim_state(store, model, None, run="sft", step=step, attachments=files)
    return store


def test_lm_eval_evaluates_a_step(store: casckpt.Store, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval with its extra hf")
    store.export("sft@100", tmp_path / "out", format="hf")
    lines = [{"question": f"{one} {two}", "answer": 1} for one in WORDS for two in WORDS]
    task: dict[str, Any] = {
        "task": "words", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "task/words.jsonl"}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": list(WORDS), "doc_to_target": "{{answer}}",
    }  # fmt: skip
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "words.yaml").write_text(json.dumps(task))  # JSON is YAML
    (tmp_path / "task" / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with serving(store) as served:
        environment = os.environ | {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", EVALUATE, "sft,revision=100", "sft,revision=200", "out"],
            check=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    first, second, exported = map(json.loads, done.stdout.splitlines()[-3:])
    assert first == exported
    assert first != second


def continued(folder: Path, prompt: str) -> Sequence[int]:
    """Return the tokens with which the model continues the prompt, according to Transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, suppress_tokens=[0])
    found: list[int] = made[0, ids.shape[1] :].tolist()
    return found


def asked(engine: Server, prompt: str) -> Sequence[int]:
    """Return the tokens with which vLLM continues the prompt."""
    body = {
        "model": "runs/sft", "prompt": prompt, "max_tokens": 12, "min_tokens": 12, "temperature": 0,
        "return_token_ids": True, "logit_bias": {"0": -100},
    }  # fmt: skip
    request = Request(
        f"{engine.endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


def test_vllm_serves_a_step_and_follows_the_run(store: casckpt.Store, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vllm for CPUs")
    for step in (100, 200):
        store.export(f"sft@{step}", tmp_path / str(step), format="hf")
    first, second = (continued(tmp_path / str(step), "one two six") for step in (100, 200))
    assert first != second
    recipe = re.search(r"--exec '\n([^']*collective_rpc[^']*)'\n", (DOCS / "follow.md").read_text())
    assert recipe

    def command(_: Path, ports: Sequence[int]) -> Sequence[str]:
        module = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(ports[0]))
        return (*module, "--model", "runs/sft", "--revision", "100", "--dtype", "float32", "--enforce-eager")

    with serving(store) as served:
        environment = {
            "HF_ENDPOINT": served.endpoint, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }  # fmt: skip
        engine = Server("vllm", command, 1, tmp_path, environment, speaks_s3=False, start_seconds=START_SECONDS)
        with running(engine):
            assert asked(engine, "one two six") == first
            told = recipe[1].replace("localhost:8000", engine.endpoint)
            (made,) = Follower(store, "sft", tmp_path / "serving", command=told).follow(once=True)
            assert (made.checkpoint.step, made.status) == (200, 0)
            assert asked(engine, "one two six") == second
