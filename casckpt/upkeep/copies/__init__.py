"""Copies of checkpoints in other stores: made once, or kept up by a mirror."""
