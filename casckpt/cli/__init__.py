"""The command line. Each command parses its arguments, calls one library function and prints the result.

`main` finds the command. `failures` converts errors to messages and exit statuses. `session` defines the options that
all commands share, and prints results as text (`text`) or JSON (`describe`).
"""
