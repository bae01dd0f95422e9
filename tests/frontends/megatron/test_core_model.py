"""Megatron-core's GPTModel and its optimizers, with their own sharded state dicts."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode

import casckpt
from casckpt.frontends import megatron
from tests.support.gpt import differences
from tests.support.megatron_core import core, module, without_cuda
from tests.support.ranks import Pool

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


class OnTheCPU(TorchFunctionMode):
    """Megatron's optimizers create tensors on "cuda", and accept only parameters on "cuda".

    This mode uses the CPU instead.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return str(func(*args)).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextmanager
def parallel(tp: int) -> Iterator[None]:
    """Megatron's process groups."""
    core()
    state = module("megatron.core.parallel_state")
    with without_cuda(), OnTheCPU(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-core's deprecation warnings
        state.initialize_model_parallel(tensor_model_parallel_size=tp)
        try:
            yield
        finally:
            state.destroy_model_parallel()


def gpt(tp: int, distributed: bool, seed: int) -> tuple[Any, Any]:
    """Return a model, and its optimizer after one step."""
    config = module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=tp, gated_linear_unit=True,
        use_cpu_initialization=True, bias_activation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    data_parallel, optimizers = module("megatron.core.distributed"), module("megatron.core.optimizer")
    model_class = module("megatron.core.models.gpt.gpt_model").GPTModel
    torch.manual_seed(seed)  # after the imports, some of which draw random numbers
    model = model_class(config, spec, vocab_size=32, max_sequence_length=8)
    options = data_parallel.DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = data_parallel.DistributedDataParallel(config, options, model)
    settings = optimizers.OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=distributed)
    optimizer = optimizers.get_megatron_optimizer(settings, [wrapped])
    for name, parameter in wrapped.named_parameters():
        torch.manual_seed(zlib.crc32(name.encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape))
    optimizer.step()
    return wrapped, optimizer


def state_of(model: Any, optimizer: Any, loading: bool = False) -> dict[str, Any]:
    """Return the sharded state dict that Megatron's training loop creates."""
    group = module("megatron.core.parallel_state").get_data_parallel_group(with_context_parallel=True)
    metadata = {**METADATA, "dp_cp_group": group}
    of_model = model.module.sharded_state_dict(metadata=metadata)
    of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
    return {"model": of_model, "optimizer": of_optimizer, "iteration": 3}


def saved(rank: int, size: int, path: Path, *, tp: int, distributed: bool, step: int) -> None:
    with parallel(tp):
        save(path, step, *gpt(tp, distributed, seed=1))


def save(path: Path, step: int, model: Any, optimizer: Any) -> None:
    folder = path / f"iter_{step}"
    folder.mkdir(exist_ok=True)
    strategy = megatron.CasSaveShardedStrategy(path / "store", run="gpt")
    core().save(state_of(model, optimizer), str(folder), strategy)


def resumed(rank: int, size: int, path: Path, *, tp: int, distributed: bool, step: int) -> None:
    """Load into a different model and its optimizer, and save both as the next step."""
    with parallel(tp):
        model, optimizer = gpt(tp, distributed, seed=7)
        template = state_of(model, optimizer, loading=True)
        found = core().load(template, str(path / f"iter_{step}"), megatron.CasLoadShardedStrategy())
        model.module.load_state_dict(found["model"])
        with with_steps(optimizer) if distributed else nullcontext():
            optimizer.load_state_dict(found["optimizer"])
        save(path, step + 1, model, optimizer)


def with_steps(optimizer: Any) -> Any:
    """Without Apex and TransformerEngine, Megatron uses torch's Adam. A load of distributed state does not restore its
    step counts."""
    (inner,) = optimizer.chained_optimizers
    put = inner._set_main_param_and_optimizer_states
    return patch.object(
        inner,
        "_set_main_param_and_optimizer_states",
        lambda parameter, tensors: put(parameter, {"step": torch.tensor(1.0), **tensors}),
    )


@pytest.mark.parametrize(
    "distributed", [pytest.param(False, marks=pytest.mark.soak), True], ids=["optimizer", "distributed optimizer"]
)
def test_a_megatron_core_model_is_unchanged_by_resharding(tmp_path: Path, ranks: Pool, distributed: bool) -> None:
    ranks.run(2, saved, tmp_path, tp=2, distributed=distributed, step=1)
    ranks.run(2, resumed, tmp_path, tp=1, distributed=distributed, step=1)
    ranks.run(1, resumed, tmp_path, tp=1, distributed=distributed, step=2)
    ranks.run(2, resumed, tmp_path, tp=2, distributed=distributed, step=3)
    first, *others = [megatron.load_plain_tensors(f"{tmp_path}/store#gpt@{step}") for step in range(1, 5)]
    assert first["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 128, 16)
    assert any("exp_avg_sq" in key for key in first)
    assert [differences(first, other) for other in others] == [[]] * 3
    assert casckpt.open(tmp_path / "store").get("gpt@4").stats.bytes_written == 0
