"""The benchmark compares casckpt with its peers and with the limits of the machine, in one interleaved run.

::

    cli ---> scenarios ---> harness: rounds A B A B ---> results ---> show: table, JSON, plots, docs
                |
                teams: worker processes, one for each rank and environment
                |
                worker ---> tasks (save, load, limits of the machine, plan, catalogue) ---> peers

The main process does not import torch. Workers run the measured code.
"""
