"""The `lockstep` command: thin functions that wire the layers below to flags and files.

Each command is a module `cli/<name>.py` that offers `command`: a function whose signature is its
flags and whose docstring is its help, or a `cyclopts.App` where there are subcommands. `main.py`
names it by import path and one line of help, so `lockstep --help` imports none of them.
"""
