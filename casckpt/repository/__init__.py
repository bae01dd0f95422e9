"""An open store, without torch: its settings, its caches, and cached reads of immutable records.

`repository` defines `Repository`, the value that all packages above take as their first argument. `opening` opens one
from a path or URL. `catalogue` is a local SQLite file that caches the content of immutable objects. casckpt can rebuild
it at any time, and no safety guarantee depends on it.
"""
