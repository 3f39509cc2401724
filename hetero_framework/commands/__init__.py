"""The heart's subcommands of `hetero`; those of extras are in extras/*/commands/.

Each is a module of its name, imported only when that command is given. The module has `EXAMPLES`,
which its help ends with, `OPTIONS`, and `run(arguments)`, which returns an exit code, None for 0.
It imports nothing slow at its top: help and simple errors come at once.
"""
