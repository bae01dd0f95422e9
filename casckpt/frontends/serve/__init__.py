"""`casckpt serve`: a store that answers like the Hugging Face Hub. It needs the extra ``serve``.

`app` routes the requests of hub clients, and `hub` builds the answers: runs are repositories, checkpoints are
revisions. `folders` plans the files of a checkpoint from its manifest, and `sending` produces any byte range of them
while it reads and verifies the cells.
"""
