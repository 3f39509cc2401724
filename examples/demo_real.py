"""Draw the diagram of a configuration; nothing is loaded or trained.

    python examples/demo_real.py --config hetero_config.json --format svg --output architecture.svg

This is `hetero diagram`; without --config it draws the three machines of llama8b_4bit.json, and
without --output it writes into runs/diagram.
"""

import argparse
import sys
from pathlib import Path

from hetero_framework.cli import main

CONFIG = Path(__file__).with_name("llama8b_4bit.json")
FOLDER = Path("runs/diagram")


def arguments(given: list[str]) -> list[str]:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--format", default="png")
    options.add_argument("--output")
    known, _ = options.parse_known_args(given)
    output = []
    if known.output is None and not {"-h", "--help"} & set(given):
        FOLDER.mkdir(parents=True, exist_ok=True)
        output = ["--output", str(FOLDER / f"architecture.{known.format}"), "--overwrite"]
    return ["diagram", "--config", str(CONFIG), *output, *given]


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
