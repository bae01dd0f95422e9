"""Converters: checkpoints of other formats into a store, and out of it, with bounded memory."""

from __future__ import annotations

from casckpt.frontends.safetensors_export import Exported, export_safetensors
from casckpt.frontends.safetensors_import import Sources, find_sources, import_safetensors

__all__ = ["Exported", "Sources", "export_safetensors", "find_sources", "import_safetensors"]
