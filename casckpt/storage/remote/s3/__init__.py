"""Objects in S3 buckets and on S3-compatible servers.

`client` lists, puts and deletes through s3fs's client. `direct` reads ranges from the socket straight into the
destination. `errors` explains a server's error response and what to do about it. `facts` reads the bucket settings
that matter to a store.
"""
