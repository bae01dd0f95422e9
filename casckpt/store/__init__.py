"""`Store`, the object that users hold, and `open`, which makes one.

`Store` checks arguments, resolves references and calls the packages below. It contains no logic of saves, loads or gc.
It imports torch only when a call needs tensors, so that `casckpt list` starts quickly.
"""
