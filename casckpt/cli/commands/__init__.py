"""The commands. Each module here is one command and has its name; a trailing ``_`` is dropped.

`casckpt.cli.main` imports a module only when its command is called. Every module defines ``command``. Commands contain
no logic of their own: whatever the command line does, Python code can do with `casckpt.Store` too.
"""
