"""`hetero train`: runs a coordinator with its machine's workers, or serves a worker's machine."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from hetero_framework import registry
from hetero_framework.commands.first_run import FirstRun
from hetero_framework.commands.init import ADAPTERS, Answers
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    DEFAULT_CONFIG,
    IMPORT,
    LIFE_LINE,
    ROLE_HELP,
    WORKER_ID,
    access_for,
    at_least,
    flag,
    key_options,
    load,
    option,
    role_of,
    value,
)
from hetero_framework.commands.worker import serve
from hetero_framework.errors import ResourceError, StoppedEarly, UserError
from hetero_framework.log import LOADING, at_work

_log = logging.getLogger(__name__)


def _resume_step(text: str) -> int | str:
    if text == "latest":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither "latest" nor a step number')


EXAMPLES = """
    hetero train --model Qwen/Qwen3-0.6B --data train.jsonl
    hetero train --config hetero_config.json
    hetero train --resume latest
    hetero train --role worker --worker-id 2
    hetero train --output-dir runs/second --set training.learning_rate=1e-4
    """
_ANSWERS = ("model", "data", "adapter", "objective")
OPTIONS = (
    *CONFIG,
    value("--model", "NAME", "without a configuration: train this model here, on all cards"),
    value("--data", "FILE", "with --model: training data, a file or dataset name"),
    option("--adapter", choices=ADAPTERS, help="with --model: what to train (default: lora)"),
    value("--objective", "NAME", "with --model: what to learn (default: what the data tell)"),
    flag("--dry-run", "show plan, memory and an estimate of the time, and stop"),
    value("--output-dir", "DIR", "instead of training.output_dir; with --model, of runs/NAME"),
    value("--resume", "latest|N", "continue from a checkpoint", type=_resume_step),
    value("--resume_step", "N", "as --resume N", type=_resume_step, dest="resume"),
    option(
        "--resume_latest",
        action="store_const",
        const="latest",
        dest="resume",
        help="as --resume latest",
    ),
    value("--checkpoint_dir", "DIR", "instead of checkpoint_dir of the file"),
    value("--save_every_n_steps", "N", "a checkpoint every N steps", type=at_least(1)),
    flag("--fresh", "start anew where an earlier run was cut short"),
    flag("--replan", "continue without workers that stay away, and take them back"),
    option("--role", choices=("coordinator", "worker"), help=ROLE_HELP),
    WORKER_ID,
    *ACCESS,
    IMPORT,
    LIFE_LINE,
)


def run(arguments: argparse.Namespace) -> int | None:
    first = _first(arguments)
    if arguments.dry_run:
        plan = registry.needed("planners", "dry_run", "--dry-run")
        print(plan(first.config() if first else load(arguments)))
        return 0
    if first is not None:
        with at_work(LOADING):
            arguments.config, arguments.set = first.written(fresh=arguments.fresh), []
    config = load(arguments, saved_plan=False)
    from hetero_framework.commands.preflight import preflight
    from hetero_framework.security.access import island_access

    options = key_options(arguments)
    role = role_of(config, options, arguments.role, arguments.worker_id)
    if not role.is_coordinator:
        return serve(config, role.worker_ids, arguments)
    config.require("model", "data")
    access = access_for(config, "local", arguments)
    islands = island_access(config, options) if config.setting("island") else None
    config.spare_base_model()
    preflight(config, writes=True)
    if not config.is_planned:
        with at_work(LOADING):
            from hetero_framework.trainer import plans

        config = plans.planned(config, access, resume=arguments.resume, fresh=arguments.fresh)
    planned = config.plan.owners
    ids = [worker for worker in role.worker_ids if worker in planned]
    _coordinate(config, ids, access, islands, arguments)
    return 0


def _first(arguments: argparse.Namespace) -> FirstRun | None:
    """What --model and the options beside it ask for; None without it. Raises UserError."""
    if arguments.model is None:
        if alone := [f"--{name}" for name in _ANSWERS if getattr(arguments, name) is not None]:
            go = "goes" if len(alone) == 1 else "go"
            raise UserError(
                f"{' and '.join(alone)} {go} with --model",
                hint="add --model NAME, or leave the rest to the configuration file",
            )
        return None
    if arguments.config != DEFAULT_CONFIG:
        raise UserError("--model makes a configuration; leave out --config, or --model")
    answers = {name: getattr(arguments, name) for name in _ANSWERS}
    return FirstRun(Answers(**answers), arguments.output_dir, arguments.set)


def _coordinate(
    config: Any, ids: Sequence[int | str], access: Any, islands: Any, arguments: argparse.Namespace
) -> None:
    """Run the coordinator, and the workers `ids` as its children."""
    from hetero_framework.cluster.child import PROGRAM
    from hetero_framework.cluster.local_workers import LocalWorkers
    from hetero_framework.cluster.run_id import run_id_of
    from hetero_framework.trainer.signals import StopRequest

    workers = None
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        try:
            # Workers import torch while this process does; `train` reports output_dir's problems.
            with contextlib.suppress(OSError, ResourceError):
                run_id = run_id_of(config.output_dir)
                program = (*PROGRAM, *access.arguments(ids))
                workers = LocalWorkers(
                    config, ids, debug=arguments.debug, run_id=run_id, program=program
                )
                stack.enter_context(workers).start()
            _log.info("this is the coordinator; torch and transformers are loaded now")
            with at_work(LOADING):
                from hetero_framework.trainer.coordinator import train

            train(
                config,
                resume=arguments.resume,
                fresh=arguments.fresh,
                replan=arguments.replan,
                debug=arguments.debug,
                workers=workers,
                access=access,
                islands=islands,
            )
        except KeyboardInterrupt:  # while the libraries are imported, here and in the workers
            if workers is not None:
                workers.stop(0.0)
            name = stop.requested or "Ctrl-C"
            raise StoppedEarly(f"stopped by {name} before the run began") from None
