"""A storage in a local folder: one read-only file for each object.

`store` implements the contract of `casckpt.storage.base`. `newfile` writes a file completely, makes it durable and only
then gives it its name. `reader` reads from the page cache where the bytes are cached, and with direct I/O where they
are not. `folders` opens paths part by part, so that no symlink leads out of the store.
"""
