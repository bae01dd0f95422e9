"""`Store`, the object that users hold, and `open`, which makes one.

`Store` checks arguments, resolves references and calls the packages below. It contains no logic of saves, loads or gc.
It imports them when they are called, so that `casckpt list` starts quickly. `listing` is what a store holds at one
instant, and `types` names what methods take and return.
"""
