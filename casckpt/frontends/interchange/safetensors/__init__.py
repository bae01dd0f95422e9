"""safetensors files and Hugging Face folders, imported and exported in bounded memory.

`importing` memory-maps a folder's files and saves their tensors without a full copy. For an export, `planned` and
`layout` compute every byte position from the manifest before the first read. Then `exporting` writes the files window
by window. `casckpt serve` uses the same layout to send any range of a file.
"""
