"""Draw the diagram of a configuration; nothing is loaded or trained.

    python examples/demo_real.py --config hetero_config.json --format svg --output architecture.svg

This is `hetero diagram`; without --config it draws the three machines of llama8b_4bit.json.
"""

import sys
from pathlib import Path

from hetero_framework.cli import main

CONFIG = Path(__file__).with_name("llama8b_4bit.json")

if __name__ == "__main__":
    sys.exit(main(["diagram", "--config", str(CONFIG), *sys.argv[1:]]))
