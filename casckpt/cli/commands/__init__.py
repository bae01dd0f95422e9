"""The commands. Each module defines the command of the same name. A trailing ``_`` in a module's name is dropped.

`casckpt.cli.main` imports a module only when its command is called. Every module defines ``command``. Commands contain
no logic of their own: Python code can do everything that the command line can do, with `casckpt.Store`.
"""
