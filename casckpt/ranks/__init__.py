"""How the ranks of a process group work together. No other package uses collectives.

An **exchange** is the only primitive: every rank sends one message, rank 0 (the **leader**) answers each, and an error
on any rank is raised on all. `ranks` implements it, with a twin for a single process. `wire` sends the messages
over gloo, and `waiting` reports ranks that do not come. `agreement` checks that all ranks mean the same checkpoint.
"""
