"""`hetero export`: writes the adapter or model of a checkpoint, or a result as GGUF."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework import registry
from hetero_framework.commands.options import IMPORT, OUTPUT_DIRECTORY, option, value
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero export --checkpoint runs/default/checkpoints/step_500 --output step500
    hetero export --checkpoint runs/default --output latest
    hetero export --gguf runs/default/adapter --llama-cpp ~/llama.cpp --output gguf
    """
OPTIONS = (
    value("--checkpoint", "DIR", "a step_N directory, or the output_dir of a run (its latest)"),
    value(
        "--gguf",
        "DIR",
        "instead of --checkpoint: convert this adapter or model to GGUF, with a Modelfile for"
        " Ollama",
    ),
    value("--llama-cpp", "DIR", "with --gguf: a clone of llama.cpp"),
    option(
        "--outtype",
        default="bf16",
        choices=("f32", "f16", "bf16", "q8_0", "auto"),
        help="with --gguf: its number type (default: bf16)",
    ),
    *OUTPUT_DIRECTORY,
    IMPORT,
    value("--config", "FILE", "configuration that names model and tokenizer (default: the run's)"),
)


def run(arguments: argparse.Namespace) -> None:
    if (arguments.checkpoint is None) == (arguments.gguf is None):
        both = "both were given" if arguments.gguf else "neither was given"
        raise UserError(f"hetero export takes one of --checkpoint DIR and --gguf DIR; {both}")
    if (arguments.gguf is None) != (arguments.llama_cpp is None):
        raise UserError(
            "--gguf and --llama-cpp go together",
            hint="--gguf DIR is an adapter or a model, --llama-cpp DIR a clone of llama.cpp",
        )
    if arguments.gguf is not None:
        _convert(arguments)
        return
    if not Path(arguments.checkpoint).is_dir():
        raise UserError(
            f"there is no directory {arguments.checkpoint}",
            hint="give a step_N directory, or the output_dir of a run",
        )
    from hetero_framework.extras.exporting.checkpoint_export import export_checkpoint
    from hetero_framework.models.files.export import OutputDirectory

    output = OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite)
    config = Path(arguments.config) if arguments.config is not None else None
    reader = export_checkpoint(Path(arguments.checkpoint), output, config)
    print(f"wrote {arguments.output}: the result of step {reader.step}")


def _convert(arguments: argparse.Namespace) -> None:
    source = Path(arguments.gguf).expanduser()
    if not source.is_dir():
        raise UserError(f"there is no directory {source}", hint="give an adapter or a model")
    convert = registry.needed("conversions", "gguf", "--gguf")
    from hetero_framework.models.files.export import OutputDirectory

    output = OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite)
    made = convert(source, Path(arguments.llama_cpp).expanduser(), output, arguments.outtype)
    print(f"wrote {made[0]}; for Ollama: ollama create NAME -f {made[1]}")
