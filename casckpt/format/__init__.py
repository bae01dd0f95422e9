"""The stored format, implemented as pure functions of values. docs/format.md is the specification.

- A **manifest** (`manifest`) maps a checkpoint's entries to **extents** (`extents`): runs of consecutive cells in one
  blob. Manifests are built from a `Draft`, and `sections` holds their parts.
- A **blob** (`blob`, `blob_writer`) is a safetensors file of cells. With its **proof** (`proof`), readers can verify
  any range of it.
- A **record** (`records`) is a small JSON file. `keys` builds and parses the keys of all objects in a store.

Values other than tensors are stored as plain data (`plain`), without pickle.
"""
