"""Adapters for casckpt and its peers. Importing an adapter does not import its library."""

from __future__ import annotations

from benchmarks.peers.base import Peer
from benchmarks.peers.dcp import Dcp
from benchmarks.peers.meta import TorchCheckpointing
from benchmarks.peers.olmo import Olmo1, Olmo3
from benchmarks.peers.orbax import Orbax
from benchmarks.peers.ours import Casckpt
from benchmarks.peers.remote import RunAi, S3Torch
from benchmarks.peers.safe import Safetensors
from benchmarks.peers.torch_save import TorchSave

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchSave, Safetensors, Dcp, TorchCheckpointing, Olmo1, Olmo3, Orbax, S3Torch, RunAi)
}
DEFAULT = ("torch.save", "safetensors", "dcp", "torch_checkpointing")
GROUPS = {
    "default": DEFAULT,
    "none": (),
    "olmo": ("olmo-0.1.0", "olmo-3.0.0"),
    "s3": ("s3torchconnector", "runai"),
    "all": tuple(PEERS),
}


def peer_class(name: str) -> type[Peer]:
    """Return the adapter with this name."""
    return Casckpt if name == Casckpt.name else PEERS[name]


def chosen(text: str) -> list[type[Peer]]:
    """Return the peers in a comma-separated list of names and groups. Raises ValueError for an unknown name."""
    names: dict[str, None] = {}
    for word in filter(None, text.split(",")):
        known = GROUPS.get(word, (word,))
        for name in known:
            if name not in PEERS:
                raise ValueError(f"no peer is called {name!r}; there are {', '.join([*PEERS, *GROUPS])}")
            names[name] = None
    return [PEERS[name] for name in names]
