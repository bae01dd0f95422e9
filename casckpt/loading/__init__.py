"""A load, from a manifest to tensors that are filled in place.

Start with `load`. `template` compares the **template** with the manifest, and reports every mismatch before the first
read. `load_plan` lists what to read for which tensor. `planned_reads` merges the ranges of each blob. `transfer` reads
them in parallel, and verifies each **cell**. `update` reads only the differences from the version in memory.
"""
