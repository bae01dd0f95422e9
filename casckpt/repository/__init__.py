"""An open store, without torch: its settings, its caches, and cached reads of immutable records.

`repository` defines `Repository`, the first argument of most functions in the packages above, and opens one from a path
or URL. `catalogue` is a local SQLite file that caches the contents of immutable objects. casckpt can rebuild it at any
time, and no safety guarantee depends on it.
"""
