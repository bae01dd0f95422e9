"""Missing and unexpected keys under each strictness."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from casckpt.errors import MissingKey
from casckpt.frontends import megatron
from casckpt.frontends.megatron import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    load,
    save,
)
from tests.support.megatron_core import core

if TYPE_CHECKING:
    from tests.support.ranks import Pool


def tensor(key: str, *shape: int, **more: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, -1.0), **more)


def numbered(key: str, *shape: int, **more: Any) -> ShardedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return ShardedTensor.from_rank_offsets(key, data, **more)


def obj(key: str, at: int = 0, of: int = 1, data: Any = None) -> ShardedObject:
    return ShardedObject(key, data, (of,), (at,))


def test_each_strictness_handles_missing_and_unexpected_keys(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def asked() -> dict[str, Any]:
        return {"w": tensor("w", 4, 3), "x": tensor("x", 1), "y": obj("y")}

    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointingException, match="a@1 lacks 'x', 'y'") as caught:
            load(asked(), where, strict=strict)
        assert isinstance(caught.value, MissingKey)
        assert caught.value.keys == ("x", "y")
    with pytest.raises(CheckpointingException, match="'b', 'o', which no rank asks for"):
        load({"w": tensor("w", 4, 3)}, where, strict=StrictHandling.RAISE_ALL)
    for strict, missing in (("return_unexpected", set()), ("return_all", {"b", "o"})):
        found = load(asked(), where, strict=strict)
        assert found[1:] == (missing, {"x", "y"})
        assert "x" not in found[0]
    assert not caplog.records
    for strict, lines in (("ignore_all", 0), ("log_unexpected", 1), ("log_all", 2)):
        with caplog.at_level(logging.WARNING):
            assert load(asked(), where, strict=strict)["w"].sum() == 66
        assert len(caplog.records) == lines
        caplog.clear()
    with pytest.raises(ValueError, match="strict='no' is not known; give one of 'assume_ok_unexpected'"):
        load({}, where, strict="no")


def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
    return [ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica_id) for i, part in enumerate(data)]


def test_a_factory_with_an_unexpected_part_is_left_out_whole(tmp_path: Path) -> None:
    save({"a": numbered("f.0", 3), "b": numbered("b", 1)}, f"{tmp_path}#a@1")
    factory = ShardedTensorFactory("f", torch.ones(2, 3), halves, torch.stack)
    found, _, unexpected = load({"f": factory, "b": tensor("b", 1)}, f"{tmp_path}#a@1", strict="return_all")
    assert (set(found), unexpected) == ({"b"}, {"f.1"})


# several ranks


def said_by_each(rank: int, size: int, where: str, strict: str) -> list[str]:
    """What a rank's own log says of keys that only the other rank, or none, asks for."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a handler for this test
    log = logging.getLogger("casckpt.frontends.megatron.strictness")
    log.addHandler(handler)
    try:
        load({"b": tensor("b", 4, replica_id=rank)}, where, strict=strict)
    finally:
        log.removeHandler(handler)
    return said


def test_missing_keys_are_logged_on_every_rank(where: str, ranks: Pool) -> None:
    words = "a@1 holds 'o', 'w', which no rank asked for"
    assert ranks.run(2, said_by_each, where, "log_all") == [[words], [words]]
    assert ranks.run(2, said_by_each, where, "log_unexpected") == [[], []]


@pytest.mark.parametrize("value", [one.value for one in megatron.StrictHandling])
def test_each_strictness_declares_its_requirements(value: str) -> None:
    validation, ours = core(".validation"), megatron.parse_strict_flag(value)
    one = validation.parse_strict_flag(value)
    assert megatron.parse_strict_flag(one) is ours
    questions = (
        "requires_explicit_ckpt_mismatch_check",
        "requires_global_app_metadata",
        "requires_returning_mismatch_keys",
    )
    for question in questions:
        wanted = getattr(validation.StrictHandling, question)(one)
        assert getattr(megatron.StrictHandling, question)(ours) is wanted
        assert getattr(megatron.StrictHandling, question)(one) is wanted
