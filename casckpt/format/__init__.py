"""The stored format, as pure functions of values. docs/format.md is the specification.

- A **manifest** (`manifest`) maps the entries of a checkpoint to **extents** (`extents`): consecutive cells in one
  blob. A `Draft` builds one, and `sections` holds its parts.
- A **blob** (`blob`, `blob_writer`) is a safetensors file of cells. Its **proof** (`proof`) verifies any range of it.
- A **record** (`records`) is a small JSON file. `keys` makes and parses the key of every object in a store.

Values that are not tensors are stored as plain data (`plain`), without pickle.
"""
