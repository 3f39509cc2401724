"""The subcommands of `hetero` besides training."""
