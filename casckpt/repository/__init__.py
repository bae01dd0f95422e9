"""Content addresses over a storage, without torch: commits, manifests, blobs, tags, gc, verify, repair."""
