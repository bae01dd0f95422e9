"""Defines `Store`, the object that users work with, and `open`, which returns one.

`Store` checks arguments and calls the packages below. It does not contain any save, load or gc logic. It imports these
packages only when a method needs them, so that `casckpt list` starts quickly. `reading` resolves references and reads
checkpoints. `listing` represents the checkpoints and tags of a store at one instant, and `types` names the argument
and result types.
"""
