"""`python -m hetero_framework`: the `hetero` command; sets signal handlers before its imports."""

import sys

from hetero_framework.trainer.signals import STOPPED, hearing


def main() -> int:
    """Run one command and return its exit code."""
    with hearing(sys.argv[1:]):
        from hetero_framework import cli

        return cli.main()
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
