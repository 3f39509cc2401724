"""`python -m hetero_framework`: runs `hetero`; sets signal handlers before the slow imports."""

import atexit
import gc
import sys

from hetero_framework.trainer.signals import STOPPED, hearing


def main() -> int:
    """Run one command and return its exit code."""
    # All output is written by then. Freeing the objects of torch and transformers takes seconds.
    atexit.register(gc.freeze)
    with hearing(sys.argv[1:], ends=True):
        from hetero_framework import cli, log

        sys.meta_path.insert(0, log.SlowImports())
        return cli.main()
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
