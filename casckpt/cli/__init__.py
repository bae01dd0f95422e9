"""The command line: each command parses, calls one function, and renders what it gives as text or JSON."""
