"""`hetero verify`: compares a cut model with the whole model."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_framework.commands.options import (
    DEFAULT_CONFIG,
    IMPORT,
    check_outputs,
    flag,
    load,
    value,
    writes,
)
from hetero_framework.config.objectives import needs_of
from hetero_framework.errors import UserError
from hetero_framework.log import printable


def _cuts(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        cuts = tuple(int(part) for part in text.split(","))
        if list(cuts) == sorted(set(cuts)) and cuts[0] >= 0:
            return cuts
    raise argparse.ArgumentTypeError(f"{text!r} is not a growing list of layers like 2,5")


EXAMPLES = """
    hetero verify --config hetero_config.json
    hetero verify --model-type qwen3 --cuts 1,2
    hetero verify --model-type deberta-v2 --objective classification
    hetero verify --all
    """
OPTIONS = (
    value("--config", "FILE", f"verify the configured model (default: {DEFAULT_CONFIG})"),
    IMPORT,
    value("--model-type", "NAME", "verify a tiny random model of this type or class"),
    value(
        "--objective",
        "NAME",
        "with --model-type: of the class that this objective trains (default: sft)",
    ),
    flag("--all", "verify all language models, multimodal classes and classifiers"),
    flag("--processes", "with --all: train what passes through two real workers, too"),
    value("--cuts", "2,5", "cut before these layers", type=_cuts),
    *writes("with --all: file for the table (default: docs/architectures.md)"),
)


def run(arguments: argparse.Namespace) -> int:
    if (arguments.config is not None) + (arguments.model_type is not None) + arguments.all > 1:
        raise UserError("give only one of --config, --model-type and --all")
    if arguments.all and arguments.cuts:
        raise UserError("--cuts goes with --config or --model-type; --all chooses its own")
    if arguments.objective and not arguments.model_type:
        raise UserError("--objective goes with --model-type; a configuration has its own")
    needs = needs_of(arguments.objective or "sft")
    if needs.task == "chain":
        raise UserError(
            f"a model for {arguments.objective} is verified with the --config that names it"
        )
    for name in ("output", "processes"):
        if getattr(arguments, name) and not arguments.all:
            raise UserError(f"--{name} goes with --all")
    config = None
    if not (arguments.all or arguments.model_type):
        from hetero_framework.commands.preflight import preflight

        config = load(arguments)
        config.require("model")
        preflight(config, data=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order
    from hetero_framework.extras.verify.verification import verify_model, with_pictures

    if arguments.all:
        from hetero_framework.extras.verify.architectures import verify_all, write_architectures

        output = Path(arguments.output or "docs/architectures.md")
        check_outputs(arguments, output)
        with contextlib.ExitStack() as stack:
            tried: Any = {}
            if arguments.processes:
                from hetero_framework.extras.verify.processes import real_workers

                tried = {"tried": stack.enter_context(real_workers())}
            write_architectures(verify_all(_print_result, **tried), output)
        print(f"wrote {output}")
        return 0
    result = verify_model(
        config, model_type=arguments.model_type, task=needs.task, cuts=arguments.cuts
    )
    if arguments.model_type and needs.task == "causal-lm":
        result = replace(result, pictures=with_pictures(arguments.model_type))
    _print_result(result)
    return 0 if result.passed else UserError.exit_code


def _print_result(result: Any) -> None:
    from hetero_framework.config import layers_text

    cuts = " | ".join(layers_text(rng.start, rng.end) for rng in result.stages)
    numbers = (
        f"differences: loss {result.loss_difference:.1e}, gradients"
        f" {result.gradient_difference:.1e}, weights {result.weight_difference:.1e}"
    )
    task = "" if result.task == "causal-lm" else f", {result.task}"
    subject = f"{result.model_type} ({result.subject}{task}): {result.verdict}"
    half = f"in bfloat16 autocast {result.half}" if result.half and result.passed else ""
    beside = f"crosses: {result.crossing}" if result.crossing else ""
    processes = f"in three processes: {result.processes}" if result.processes else ""
    seeing = f"with pictures: {result.pictures}" if result.pictures else ""
    unused = f"left out: {', '.join(result.towers)}" if result.towers else ""
    about = subject, cuts, numbers, result.reason, half, beside, processes, seeing, unused
    parts = filter(None, about)
    print(printable("; ".join(parts)), flush=True)
