"""Storage in a local folder, with one read-only file per object.

`store` implements the contract in `casckpt.storage.base`. `newfile` writes a complete file, makes it durable, and only
then gives it its name. `reader` reads cached bytes from the page cache and all others with direct I/O. `folders` opens
paths one component at a time, so that no symlink can lead out of the store.
"""
