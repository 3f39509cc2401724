"""Start the configuration wizard; the same as `hetero init`."""

import sys

from hetero_framework.cli import main

if __name__ == "__main__":
    sys.exit(main(["init", *sys.argv[1:]]))
