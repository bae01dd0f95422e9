"""The command line. Each command parses its arguments, calls one function of the library and prints the result.

`main` finds the command and turns errors into one message and an exit status (`failures`). `session` holds the options
that all commands share, and prints results as text (`text`) or JSON (`describe`).
"""
