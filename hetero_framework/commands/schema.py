"""`hetero schema`: prints the JSON Schema of the configuration."""

from __future__ import annotations

import argparse
import json

EXAMPLES = """
    hetero schema > hetero_config.schema.json
    """
OPTIONS = ()


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.config import json_schema

    print(json.dumps(json_schema(), indent=2))
