"""`hetero plan`: chooses or evaluates a plan for machines that are measured or estimated."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from hetero_framework import repository
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    DEFAULT_CONFIG,
    IMPORT,
    JSON,
    ROLE_HELP,
    OutputFile,
    access_for,
    at_least,
    check_coordinator,
    flag,
    load,
    option,
    overwrite,
    repeated,
    report,
    value,
)
from hetero_framework.errors import UserError

_log = logging.getLogger(__name__)

EXAMPLES = """
    hetero plan --dry-run --model meta-llama/Llama-3.1-8B --device "local=RTX 4090 +64GB" \\
        --device "1=RTX 3090" --device "2=Apple M2 Max 64GB" --bandwidth 1Gbit/s
    hetero plan --measure --config cluster.json
    hetero plan --measure --config cluster.json --save-profile fleet.json --write
    hetero plan --measure --config cluster.json --evaluate cluster.json
    hetero plan --profile fleet.json --pin 1=4:12 --exclude 2 --margin local=2GiB --json
    hetero plan --profile fleet.json --evaluate plan.json
    """
_SOURCES = ("measure", "dry_run", "profile")
_JOB = ("adapter", "max_length", "batch_size", "workload")
OPTIONS = (
    *CONFIG,
    IMPORT,
    flag("--measure", "measure the machines of the configuration and their links"),
    flag("--anew", "measure everything again, also where a machine has cached results"),
    flag(
        "--dry-run",
        "estimate from the model's config.json and makers' figures: downloads nothing else and"
        " contacts no other machine",
    ),
    value("--profile", "FILE", "use this profile, measured before or written by hand"),
    value("--model", "NAME", "with --dry-run: this model instead of the configured one"),
    repeated(
        "--device",
        "ID=NAME",
        'with --dry-run: the device of a process, as in "1=RTX 3090 +64GB", a card in a machine of'
        ' 64 GB of memory (else 32 GB are assumed), or "local=Apple M2 Max 64GB"; may be repeated',
    ),
    option(
        "--adapter",
        choices=("lora", "qlora", "none"),
        help="with --dry-run: what to train, instead of the configured adapter",
    ),
    value("--max-length", "N", "with --dry-run: tokens per sample", type=at_least(1)),
    value("--batch-size", "N", "with --dry-run: samples per micro-batch", type=at_least(1)),
    option(
        "--workload",
        choices=("grpo",),
        help="with --dry-run: also sampling; a micro-batch is the group of texts of one prompt",
    ),
    repeated(
        "--bandwidth",
        "[ID=]SPEED",
        "with --dry-run: network speed of all processes, or of one, as in 2=100Mbit/s (default:"
        " 1Gbit/s); may be repeated",
    ),
    value("--save-profile", "FILE", "save the measured or estimated profile", type=OutputFile),
    flag("--write", "write the plan into the configuration"),
    value("--evaluate", "FILE", "predict the step of this plan instead of choosing one"),
    overwrite(),
    repeated("--pin", "ID=START:END", "layers that this process must hold; may be repeated"),
    repeated("--exclude", "ID", "worker that must hold no layers; may be repeated"),
    repeated("--margin", "ID=SIZE", "memory to leave free on this process; may be repeated"),
    repeated(
        "--allow",
        "LIST",
        "further choices for the plan, besides checkpointing and chunks: codec, micro-batch; they"
        " change the results slightly",
    ),
    option("--role", choices=("coordinator",), help=ROLE_HELP),
    *ACCESS,
    JSON,
)


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    from hetero_framework.extras.planner import plan_report
    from hetero_framework.extras.planner.plan_report import Wishes

    profile, config, about = _profile(arguments)
    # An estimate has left these workers out already.
    excluded = () if arguments.dry_run else arguments.exclude
    wishes = Wishes(arguments.pin, excluded, arguments.margin, arguments.allow)
    if arguments.evaluate is not None:
        own = config is not None and arguments.evaluate == arguments.config
        raw = config.to_dict() if own else None  # with --set, and of YAML
        result = plan_report.judge_plan(profile, Path(arguments.evaluate), wishes, raw)
    else:
        result = plan_report.make_plan(profile, wishes)
    described = {**plan_report.described(result), **about}
    if arguments.measure:
        described["measured_links"] = profile.to_dict()["links"]
    if about:
        from hetero_framework.extras.planner.estimate import pace, rollouts

        job = about["estimate"]["job"]
        described["estimate"]["pace"] = pace(job, result.predicted_step_s)
        if arguments.workload is not None:
            described["estimate"]["rollouts"] = rollouts(job, described)
    if arguments.evaluate is None:
        described |= plan_report.compared_machines(profile, wishes, result, config)
    report(arguments, described, plan_report.text)
    if arguments.write:
        written = plan_report.write_plan(described, Path(arguments.config))
        _log.info("wrote the plan into %s", arguments.config)
        if written.model is not None and not about:  # a run is not compared with an estimate
            from hetero_framework.extras.planner.result import save_plan

            save_plan(written, result)


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for options that do not go together."""
    if sum(bool(getattr(arguments, name)) for name in _SOURCES) != 1:
        raise UserError("hetero plan needs one of --measure, --dry-run and --profile FILE")
    if arguments.save_profile is not None and arguments.profile is not None:
        raise UserError("--save-profile keeps what --measure or --dry-run finds")
    if arguments.anew and not arguments.measure:
        raise UserError("--anew goes with --measure")
    for name in ("model", "device", "bandwidth", *_JOB):
        if getattr(arguments, name) and not arguments.dry_run:
            raise UserError(f"--{name.replace('_', '-')} goes with --dry-run")
    if arguments.write and Path(arguments.config).suffix in (".yaml", ".yml"):
        raise UserError(
            f"--write does not change {arguments.config}: the comments of YAML would be lost",
            hint='let shard_plan be "auto" there, or copy the one that --json prints',
        )
    if arguments.write and any(getattr(arguments, name) for name in _JOB):
        raise UserError(
            "--write would put a plan for another job into the configuration",
            hint="set adapter, data.max_length or training.per_device_train_batch_size there, and"
            " leave the option out",
        )
    if arguments.evaluate is not None and (arguments.pin or arguments.exclude or arguments.allow):
        raise UserError("--evaluate takes the plan as it is, without --pin, --exclude, --allow")
    if arguments.evaluate is not None and arguments.write:
        raise UserError("--write puts a new plan into the configuration, without --evaluate")


def _profile(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """The profile, its configuration (None for a profile in a file), and for an estimate its
    assumptions."""
    from hetero_framework.extras.planner import load_profile

    about: dict[str, Any] = {}
    if arguments.profile is not None:
        return load_profile(arguments.profile), None, about
    if arguments.dry_run:
        config = _paper_config(arguments)
        from hetero_framework.extras.planner.estimate import estimate_fleet

        given = (arguments.device, arguments.bandwidth, arguments.exclude)
        profile, about["estimate"] = estimate_fleet(config, *given)
    else:
        profile, config = _measured(arguments)
    if arguments.save_profile is not None:
        from hetero_framework.core.files import write_json

        write_json(Path(arguments.save_profile), profile.to_dict())
    return profile, config, about


def _measured(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The profile of the configuration's machines, and the configuration."""
    config = load(arguments, saved_plan=arguments.evaluate is not None)
    check_coordinator(config, arguments)
    _find_model(config)
    from hetero_framework.extras.planner.fleet import measure_fleet
    from hetero_framework.models.files.source import ModelSource

    for line in ModelSource.of(config).stored_lines() if config.model else ():
        _log.info("%s", line)
    access = access_for(config, "local", arguments)
    return measure_fleet(config, access=access, anew=arguments.anew), config


def _paper_config(arguments: argparse.Namespace) -> Any:
    """The configuration. Without a file it is the proposal of `hetero init` for --model and the
    workers that --device names."""
    is_there = Path(arguments.config).exists()
    if arguments.model is None or is_there or arguments.config != DEFAULT_CONFIG:
        config = load(arguments, saved_plan=False)
        if arguments.model is not None:
            name = {"name_or_path": arguments.model, "from_config": None}
            config = config.with_changes(
                model=name if config.model else {"name_or_path": arguments.model}
            )
        _find_model(config)
    else:
        repository.resolve_model_path(arguments.model, Path.cwd())
        from hetero_framework.extras.planner.estimate import paper_config

        config = paper_config(arguments.model, arguments.device, arguments.set, arguments.adapter)
    from hetero_framework.extras.planner.estimate import other_job

    return other_job(
        config, arguments.adapter, max_length=arguments.max_length, rows=arguments.batch_size
    )


def _find_model(config: Any) -> None:
    """Raise ModelError for a path that leads nowhere, before anything slow is imported."""
    if config.model is not None and config.model.name_or_path is not None:
        repository.resolve_model_path(config.model.name_or_path, config.base_dir)
