"""An open store that does not need torch: its settings, its caches, and cached reads of immutable records.

`repository` defines `Repository`, which functions in all packages above accept as their first argument. `opening`
opens one from a path or URL. `catalogue` is a local SQLite file that caches the contents of immutable objects. casckpt
can rebuild it at any time, and no safety guarantee depends on it.
"""
