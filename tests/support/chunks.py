"""A tensor that reports its own chunks to DCP."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tests.support.together import numbers


def half(rows: int = 2, key: str = "a") -> Chunks:
    """Return a 4 x 2 tensor, of which this process holds the first ``rows`` rows."""
    return Chunks(torch.Size((4, 2)), {(0, 0): numbers(key, rows, 2)})


class Chunks(torch.Tensor):
    """A tensor that reports its chunks to DCP, as DTensor does."""

    held: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls: type[Chunks], shape: torch.Size, held: dict[tuple[int, ...], torch.Tensor]) -> Chunks:
        made: Chunks = torch.Tensor._make_wrapper_subclass(cls, shape)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch's own is typed as a function
        raise NotImplementedError(f"{func} of something that is only saved and loaded")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, at),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(data), self.size()),
            )
            for chunk, (at, data) in zip(self.__create_chunk_list__(), self.held.items(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), data.size()) for at, data in self.held.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.held[tuple(index.offset or ())]
