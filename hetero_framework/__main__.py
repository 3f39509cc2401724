"""`python -m hetero_framework`: runs `hetero`; sets signal handlers before the slow imports."""

import atexit
import gc
import sys
from importlib.machinery import PathFinder

from hetero_framework.trainer.signals import STOPPED, hearing


def main() -> int:
    """Run one command and return its exit code."""
    # All output is written by then. Freeing the objects of torch and transformers takes seconds.
    atexit.register(gc.freeze)
    with hearing(sys.argv[1:], ends=True):
        from hetero_framework import cli, log

        # Behind the finders of others, which may replace a library.
        sys.meta_path.insert(sys.meta_path.index(PathFinder), log.SlowImports())
        return cli.main()
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
