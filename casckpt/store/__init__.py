"""Defines `Store`, the class that users work with, and `open`, which returns a store.

`Store` checks arguments and calls the packages below. It does not contain any save, load or gc logic. It imports these
packages only when a method needs them, so that `casckpt list` starts quickly. `reading` resolves references and reads
checkpoints. `listing` is a snapshot of a store's checkpoints and tags, and `types` defines the argument and result
types.
"""
