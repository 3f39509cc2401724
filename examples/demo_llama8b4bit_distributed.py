"""Fine-tune Llama-3.1-8B in 4 bits over three machines with LoRA; run it on each of them.

    python examples/demo_llama8b4bit_distributed.py --data train.jsonl

Write the machines' addresses into examples/llama8b_4bit.json first. Further options are those of
`hetero train`. With `--model DIR` another model takes the place of Llama-3.1-8B, cut evenly over
the same machines.
"""

import argparse
import json
import sys
from pathlib import Path

from hetero_framework.cli import main

CONFIG = Path(__file__).with_name("llama8b_4bit.json")


def settings(model: str | None, data: str | None) -> list[str]:
    """The `--set` options that put another model or other data into the configuration."""
    changed: dict[str, object] = {}
    if data is not None:
        changed["data.train"] = str(Path(data).absolute()) if Path(data).exists() else data
    if model is not None:
        from hetero_framework.commands.init import split_layers
        from hetero_framework.config import ModelConfig, load_config
        from hetero_framework.models.cut.introspect import introspect
        from hetero_framework.models.files.source import ModelSource

        name = str(Path(model).absolute()) if Path(model).exists() else model
        config = load_config(CONFIG)
        found = ModelSource(ModelConfig(name_or_path=name), config.base_dir).config
        layers = introspect(found).num_layers
        changed["model.name_or_path"] = name
        changed["model.dtype"] = "auto"
        ranges = split_layers(layers, len(config.shard_plan))
        for index, (start, end) in enumerate(ranges):
            changed[f"shard_plan[{index}].start"] = start
            changed[f"shard_plan[{index}].end"] = end
    return [f"--set={name}={json.dumps(value)}" for name, value in changed.items()]


def run(argv: list[str]) -> int:
    """Take our own options off and hand the rest to `hetero train`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--model", metavar="DIR", help="another model, to try this out")
    parser.add_argument("--data", metavar="FILE", help="training data")
    parser.add_argument("-h", "--help", action="store_true")
    own, rest = parser.parse_known_args(argv)
    if own.help:
        parser.print_help()
        return main(["train", "--help"])
    return main(["train", "--config", str(CONFIG), *settings(own.model, own.data), *rest])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
