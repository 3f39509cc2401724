"""`hetero export`: writes the adapter or model of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import (
    IMPORT,
    OUTPUT_DIRECTORY,
    option,
)
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero export --checkpoint runs/default/checkpoints/step_500 --output step500
    hetero export --checkpoint runs/default --output latest
    """
OPTIONS = (
    option(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step_N directory, or the output_dir of a run (its latest)",
    ),
    *OUTPUT_DIRECTORY,
    IMPORT,
    option(
        "--config",
        metavar="FILE",
        help="configuration that names model and tokenizer (default: the run's)",
    ),
)


def run(arguments: argparse.Namespace) -> None:
    if not Path(arguments.checkpoint).is_dir():
        raise UserError(
            f"there is no directory {arguments.checkpoint}",
            hint="give a step_N directory, or the output_dir of a run",
        )
    from hetero_framework.models.files.export import OutputDirectory
    from hetero_framework.trainer.checkpoint_export import export_checkpoint

    output = OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite)
    config = Path(arguments.config) if arguments.config is not None else None
    reader = export_checkpoint(Path(arguments.checkpoint), output, config)
    print(f"wrote {arguments.output}: the result of step {reader.step}")
