"""`python -m hetero_framework`: the `hetero` command; sets signal handlers before its imports."""

import atexit
import gc
import sys

from hetero_framework.trainer.signals import STOPPED, hearing


def main() -> int:
    """Run one command and return its exit code."""
    # All is written by then. Collecting what torch and transformers hold would take seconds.
    atexit.register(gc.freeze)
    with hearing(sys.argv[1:], ends=True):
        from hetero_framework import cli

        return cli.main()
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
