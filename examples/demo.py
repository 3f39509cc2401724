"""The whole job on this machine, offline: `hetero demo`, into runs/demo, whose files it replaces.

make demo        or        python examples/demo.py
"""

import sys
from pathlib import Path

from hetero_framework.cli import main

if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[1] / "runs" / "demo"
    sys.exit(main(["demo", "--output", str(folder), "--overwrite", *sys.argv[1:]]))
