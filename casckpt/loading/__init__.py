"""A load, from a manifest to tensors in place.

Start with `load`. `template` compares the **template** with the manifest and raises every mismatch before the first
read. `load_plan` lists what to read for which tensor, `planned_reads` merges the ranges of each blob, and
`transfer` reads them in parallel and verifies each **cell**. `update` reads only what differs from the version in
memory.
"""
