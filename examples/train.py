"""Train; the same command on every machine of the configuration.

    python examples/train.py --config hetero_config.json

The machine finds its role by its addresses and host name; `--role` and `--worker-id` decide
otherwise. This is `hetero train`.
"""

import sys

from hetero_framework.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
