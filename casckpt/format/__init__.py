"""What is stored, as pure functions of values: keys, regions, manifests, records, blobs, plain data. docs/format.md."""
