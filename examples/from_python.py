"""Train from Python, with records, a callback and an evaluation; adapt what you need.

    python examples/from_python.py hetero_config.json

The configuration says which machines there are, which model they train and with which settings;
start `hetero worker` on the other machines. examples/notebook.ipynb needs no configuration.
"""

import sys
from typing import Any

from transformers import TrainerCallback

from hetero_framework import load_config, train

RECORDS = [
    {"prompt": f"What is {a} plus {b}?", "completion": f" It is {a + b}."}
    for a in range(10)
    for b in range(10)
]


class Losses(TrainerCallback):
    """Prints what the Trainer would log."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        print(state.global_step, logs)


def main(path: str) -> None:
    """Train as the configuration at `path` says, on RECORDS."""
    summary = train(
        load_config(path),
        train_dataset=RECORDS[:-10],
        eval_dataset=RECORDS[-10:],
        callbacks=[Losses],
    )
    print("loss", summary.metrics["loss"], "in", summary.output_dir)
    print(type(summary.load()).__name__, "is loaded")


if __name__ == "__main__":
    main(*sys.argv[1:])
