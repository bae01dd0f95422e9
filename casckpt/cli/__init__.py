"""The command line. Each command parses its arguments, calls one function of the library and prints the result.

`main` finds the command. `failures` turns an error into a message and an exit status. `session` holds the options that
all commands share. It prints results as text (`text`) or JSON (`describe`).
"""
