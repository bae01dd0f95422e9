"""`casckpt serve`: serves a store with the API of the Hugging Face Hub. It needs the extra ``serve``.

`app` routes the requests of hub clients, and `hub` builds the responses: runs are repositories, and checkpoints are
revisions. `folders` plans the files of a checkpoint from its manifest. `sending` produces any byte range of these
files while it reads and verifies the cells.
"""
