"""Objects in S3 buckets, and on servers that speak the S3 protocol.

`client` lists, puts and deletes through the client of s3fs. `direct` reads ranges from the socket straight into the
destination. `errors` explains what a server answered and what to do, and `facts` reads the settings of a bucket that
matter to a store.
"""
