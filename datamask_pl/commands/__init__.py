"""One thin file per command: arguments, a call, lines for the terminal.

A command is a typed function that `cli.COMMANDS` names; its docstring is its help. `fit` alone is Lightning's, and
wires parser and trainer. What a command computes is in the folders below.
"""
