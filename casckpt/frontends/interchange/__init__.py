"""Imports and exports of other formats, in bounded memory.

`export` chooses the format of an export. `safetensors` reads and writes safetensors files and Hugging Face folders,
`torch_files` reads and writes files of torch.save, and `olmo_import` reads checkpoints of OLMo-core. `new_files`
ensures that results are either complete under their final name or absent.
"""
