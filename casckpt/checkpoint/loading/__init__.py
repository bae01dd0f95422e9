"""The load path: from a manifest to tensors, in place."""
