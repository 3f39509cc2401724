"""The heart's subcommands of `hetero`; extras have theirs in extras/*/commands/.

Each subcommand is a module of its name, imported only when the command is given. The module has
`EXAMPLES` (the end of its help), `OPTIONS` and `run(arguments)`, which returns an exit code or None
for 0. It imports nothing slow at its top, so that help and simple errors come at once.
"""
