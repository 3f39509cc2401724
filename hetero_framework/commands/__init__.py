"""What the subcommands of `hetero` do, besides training."""
