"""The command line. Each command parses its arguments, calls one library function and prints the result.

`main` finds the command. `failures` turns an error into a message and an exit status. `session` defines the options
that all commands share, and prints results as text (`text`) or JSON (`describe`).
"""
