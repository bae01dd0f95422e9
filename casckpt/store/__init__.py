"""`Store`, the object that users hold, and `open`, which makes one.

`Store` checks arguments and calls the packages below. It contains no logic of saves, loads or gc. It imports these only
when a method needs them, so that `casckpt list` starts quickly. `reading` resolves references and reads checkpoints.
`listing` has the checkpoints and tags of a store at one instant, and `types` names the types of arguments and results.
"""
