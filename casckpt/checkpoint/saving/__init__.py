"""The save path: from a state to blobs, a manifest and a commit."""
