"""`hetero merge`: folds an adapter into its model."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework import repository
from hetero_framework.commands.options import IMPORT, OUTPUT_DIRECTORY, option, value
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero merge --adapter runs/llama8b/adapter --model meta-llama/Llama-3.1-8B --output merged
    """
OPTIONS = (
    value("--adapter", "DIR", "PEFT adapter directory", required=True),
    value("--model", "NAME", "model directory or hub name", required=True),
    *OUTPUT_DIRECTORY,
    IMPORT,
    value("--revision", "NAME", "branch, tag or commit on the hub"),
    option(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="data type of the result (default: the model's)",
    ),
)


def run(arguments: argparse.Namespace) -> None:
    if not Path(arguments.adapter).is_dir():
        raise UserError(f"there is no adapter directory {arguments.adapter}")
    repository.resolve_model_path(arguments.model, Path.cwd())
    from hetero_framework.extras.exporting.merge import merge_adapter
    from hetero_framework.models.files.export import OutputDirectory

    merge_adapter(
        Path(arguments.adapter),
        arguments.model,
        OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite),
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    print(f"wrote {arguments.output}")
