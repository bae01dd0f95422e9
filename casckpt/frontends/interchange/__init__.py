"""Imports and exports of other formats, in bounded memory.

`export` chooses the format of an export. `safetensors` reads and writes safetensors files and Hugging Face folders,
`torch_files` reads and writes torch.save files, and `olmo_import` reads OLMo-core checkpoints. `new_files` ensures
that results are either complete under their final name or absent.
"""
