"""Lists of models and of optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn, optim

from casckpt.errors import InvalidInput
from casckpt.frontends.trainer import Checkpointer
from tests.support.saves import small
from tests.support.training import contents, identical


class Stages(nn.Module):
    """Part of a model: some of its layers, under their names in the whole model."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)


def test_lists_of_models_and_optimizers_act_as_one_model_and_one_optimizer() -> None:
    store, layers = small(), {str(number): nn.Linear(3, 3) for number in range(4)}
    whole = Stages(layers)
    parts = [Stages({name: layers[name] for name in names}) for names in ("01", "23")]
    optims = [optim.AdamW(parts[0].parameters()), optim.SGD(parts[1].parameters(), momentum=0.9)]
    for number, layer in enumerate(layers.values()):
        layer(torch.full((1, 3), float(number))).sum().backward()
    for one in optims:
        one.step()
    checkpointer = Checkpointer(store, run="sft")
    saved = checkpointer.save(1, parts, optims)
    assert set(store.read("sft@1")["model"]) == set(whole.state_dict())
    groups = store.read(saved)["optim"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [4, 4]
    want = [contents(part, one) for part, one in zip(parts, optims, strict=True)]
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    again = [optim.AdamW(parts[0].parameters()), optim.SGD(parts[1].parameters(), momentum=0.9)]
    checkpointer.load("sft@1", parts, again, load_optim_state=True)
    assert identical([contents(part, one) for part, one in zip(parts, again, strict=True)], want)
    loaded = Checkpointer(store, run="sft")
    loaded.load("sft@1", whole)
    with pytest.raises(InvalidInput, match="two optimizers have the parameter"):
        checkpointer.save(2, parts[0], [optims[0], optims[0]])
    with pytest.raises(InvalidInput, match="two parts of the model have the name"):
        checkpointer.save(2, [parts[0], Stages({"0": nn.Linear(3, 3)})])
