"""Objects behind a network: buckets of S3, and whatever else fsspec knows."""
