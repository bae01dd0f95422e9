"""The commands: each module here is one, under its own name; a trailing "_" is dropped.

A module is imported when its command is asked for. To add one, add a module with a `click.Command` named ``command``,
and its two rows in docs/cli.md.
"""
