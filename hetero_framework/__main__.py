"""`python -m hetero_framework` is the `hetero` command."""

import sys

from hetero_framework.cli import main

if __name__ == "__main__":
    sys.exit(main())
