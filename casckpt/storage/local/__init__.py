"""A storage in a local folder: one read-only file for each object.

`store` implements the contract of `casckpt.storage.base`. `newfile` writes a complete file, makes it durable and then
gives it its name. `reader` reads cached bytes from the page cache, and others with direct I/O. `folders` opens paths
part by part, so that no symlink leads out of the store.
"""
