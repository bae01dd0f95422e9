"""Cooperation of the ranks of a process group. No other package uses collectives.

An **exchange** is the only primitive: every rank sends one message, rank 0 (the **leader**) answers each message, and
an error on any rank is raised on all ranks. `ranks` implements it, along with a counterpart for a single process.
`wire` sends the messages over gloo, in a star around rank 0, and `waiting` reports absent ranks. `agreement` checks
that all ranks name the same checkpoint.
"""
