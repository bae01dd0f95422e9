"""`Store`, the object that users hold, and `open`, which makes one.

`Store` checks arguments and calls the packages below. It contains no logic of saves, loads or gc, and imports them when
they are called, so that `casckpt list` starts quickly. `reading` resolves references and reads what they name.
`listing` is what a store holds at one instant, and `types` names what methods take and return.
"""
