"""The states to save and load. Their tensors contain incompressible bytes, which are equal in every process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PIECE = 8 << 20  # bytes of random numbers drawn at a time
_POISON = 0xA5
_ITEMSIZE = {"bfloat16": 2, "float32": 4}
_EXPONENT = {"bfloat16": ("int16", 0x7F80, 0x4000), "float32": ("int32", 0x7F800000, 0x40000000)}
ADAPTERS = "adapter."


@dataclass(frozen=True)
class Spec:
    """A tensor of a state."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * _ITEMSIZE[self.dtype]


def specs(kind: str, size: int) -> list[Spec]:
    """Return the tensors of a state of about ``size`` bytes.

    ``kind``: "model": a transformer in bfloat16; "adapted": a transformer with 96 % of the bytes and adapters with 4
    %; "small": tensors of 1 KiB; "experts": those of a mixture of experts and of its optimizer, each of 1 KiB; "large
    experts": the same, each of 16 KiB; "square": a single float32 matrix whose sides are multiples of 64; "narrow": a
    matrix of 2048 x 64.
    """
    if kind == "model":
        return list(_model(size))
    if kind == "adapted":
        return [*_model(size * 96 // 100), *_adapters(size * 4 // 100)]
    if kind == "small":
        return [Spec(f"small.{i:05}", (256,), "float32") for i in range(max(1, size >> 10))]
    if kind.endswith("experts"):
        each = 1 << 10 if kind == "experts" else 16 << 10
        return list(islice(_experts(each), max(3, size // each)))
    if kind == "square":
        side = max(64, int((size / 4) ** 0.5) // 64 * 64)
        return [Spec("matrix", (side, side), "float32")]
    if kind == "narrow":
        return [Spec("matrix", (2048, 64), "float32")]
    raise ValueError(f"no state is called {kind!r}")


def _model(size: int) -> Iterator[Spec]:
    hidden = 64
    while hidden < 2048 and 12 * (2 * hidden) ** 2 * 2 <= size // 8:
        hidden *= 2
    matrices = {"q": hidden, "k": hidden, "v": hidden, "o": hidden, "up": 4 * hidden, "down": 4 * hidden}
    left = size
    for layer in range(size // (24 * hidden**2 + 4 * hidden)):
        for name, width in matrices.items():
            yield Spec(f"layers.{layer}.{name}.weight", (hidden, width), "bfloat16")
        for name in ("norm1", "norm2"):
            yield Spec(f"layers.{layer}.{name}.weight", (hidden,), "bfloat16")
        left -= 24 * hidden**2 + 4 * hidden
    rows = left // (2 * hidden) // 8 * 8
    if rows:
        yield Spec("embedding.weight", (rows, hidden), "bfloat16")


def _experts(nbytes: int) -> Iterator[Spec]:
    """Yield tensors of ``nbytes`` bytes with the names of a mixture of 256 experts: each parameter and its moments."""
    for layer in count():
        experts = [f"mlp.experts.{i}.{name}_proj" for i in range(256) for name in ("gate", "up", "down")]
        for name in ("self_attn.q_proj", "self_attn.kv_proj", "self_attn.o_proj", "mlp.gate", *experts):
            key = f"model.layers.{layer}.{name}.weight"
            yield Spec(key, (nbytes // 128, 64), "bfloat16")
            for moment in ("exp_avg", "exp_avg_sq"):
                yield Spec(f"optimizer.state.{key}.{moment}", (nbytes // 256, 64), "float32")


def _adapters(size: int) -> Iterator[Spec]:
    """Return 64 adapters with the two moments of their optimizer state."""
    rows = max(8, size // (64 * 3 * 64 * 4))
    for number in range(64):
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            yield Spec(f"{ADAPTERS}{number}.{part}", (rows, 64), "float32")


def make(kind: str, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Create a state in touched memory. Elements are never NaN or infinite, because some peers check for these."""
    return {spec.name: random_tensor(spec, seed + number) for number, spec in enumerate(specs(kind, size))}


def random_tensor(spec: Spec, seed: int) -> torch.Tensor:
    """Return a tensor of random bits."""
    import numpy as np
    import torch

    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    raw = as_bytes(tensor).numpy()
    draw = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, raw.size, _PIECE):
        raw[start : start + _PIECE] = np.frombuffer(draw.bytes(min(_PIECE, raw.size - start)), np.uint8)
    word, exponent, bit = _EXPONENT[spec.dtype]
    words = raw.view(word)
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE]
        piece[(piece & exponent) == exponent] &= ~bit
    return tensor


def as_bytes(tensor: Any) -> torch.Tensor:
    """Return the memory of a contiguous tensor as one row of bytes."""
    import torch

    flat: torch.Tensor = tensor.detach().reshape(-1)
    return flat.view(torch.uint8)


def change(state: dict[str, torch.Tensor], *, prefix: str = "") -> None:
    """Change every byte of the tensors whose names start with ``prefix``. 255 calls yield 255 different values."""
    for name, tensor in state.items():
        if name.startswith(prefix):
            as_bytes(tensor).add_(1)


def nudge(state: dict[str, torch.Tensor]) -> None:
    """Change a few bytes of every tensor. A second call changes them back."""
    for tensor in state.values():
        as_bytes(tensor)[:64].bitwise_xor_(3)


def poisoned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Create tensors of the same form in touched memory, with values that do not occur in states."""
    import torch

    made = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    poison(made)
    return made


def poison(state: dict[str, torch.Tensor]) -> None:
    """Overwrite all tensors, so that a load that does not fill them is detected."""
    for tensor in state.values():
        as_bytes(tensor).fill_(_POISON)


def differing(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that differ in any bit."""
    import torch

    names = [name for name in state if not torch.equal(as_bytes(state[name]), as_bytes(other[name]))]
    return names + sorted(set(state) ^ set(other))


def size_of(state: dict[str, torch.Tensor]) -> int:
    """Return the total size of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in state.values())
