"""Use cases with tensors: save, load, in the background, and what ranks tell each other."""
