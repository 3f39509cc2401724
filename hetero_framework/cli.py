"""The `hetero` command: one function per subcommand, heavy imports inside.

`main` is the one place that turns exceptions into a message and an exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetero_framework._version import __version__
from hetero_framework.errors import (
    HeteroError,
    ResourceError,
    StoppedEarly,
    UserError,
    as_hetero_error,
)
from hetero_framework.log import Lines, log_to, one_line, printable, set_level, to_stderr

DEFAULT_CONFIG = "hetero_config.json"
INTERRUPTED = 130  # what a shell reports for SIGINT
_MAX_MESSAGE_LINES = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _use_utf8()
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # said with the usage of the command, not with that of all commands
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        with log_to("INFO", Lines(to_stderr)):
            code = arguments.run(arguments)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # `hetero ... | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        if arguments.debug:
            traceback.print_exc()
        _say_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = as_hetero_error(error)
        if known is not None:
            _say_error(str(known), kind="stopped" if isinstance(known, StoppedEarly) else "error")
            return known.exit_code
        _say_error(
            f"{type(error).__name__}: {error}\n  This is a bug; run with --debug for details."
        )
        return HeteroError.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The command line; needs no heavy import."""
    parser = argparse.ArgumentParser(
        prog="hetero",
        description="Train one language model over several machines.",
        epilog="Exit codes: 0 done, 1 a bug, 2 what you can fix, 4 peers lost, 5 numeric,"
        " 6 memory or disk, 75 stopped early and resumable.",
    )
    parser.add_argument("--version", action="version", version=f"hetero {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in (
        _add_init,
        _add_check,
        _add_train,
        _add_worker,
        _add_diagram,
        _add_bench,
        _add_timeline,
        _add_verify,
        _add_merge,
        _add_export,
        _add_doctor,
        _add_schema,
    ):
        add(commands)
    return parser


# -- init -----------------------------------------------------------------------------------------


def _add_init(commands: Any) -> None:
    parser = _command(
        commands,
        "init",
        _run_init,
        "write a configuration, by questions or from options",
        """
        hetero init
        hetero init --non-interactive --model meta-llama/Llama-3.1-8B \\
            --worker 192.168.1.20:9999:cuda:0 --worker [fd00::2]:9999 --adapter qlora \\
            --data train.jsonl
        hetero init --non-interactive --model ./model --worker localhost:29501 --adapter none
        """,
    )
    parser.add_argument("--non-interactive", action="store_true", help="ask nothing")
    parser.add_argument("--model", metavar="NAME", help="model directory or hub name")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="HOST[:PORT[:DEVICE]]",
        help="a worker; may be given several times",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST[:PORT[:DEVICE]]",
        help="the coordinator (default: this machine)",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="number of layers (default: read from the model)"
    )
    parser.add_argument(
        "--adapter", choices=("lora", "qlora", "none"), help="what to train (default: lora)"
    )
    parser.add_argument("--data", metavar="FILE", help="training data: file or dataset name")
    parser.add_argument(
        "--output", default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def _run_init(arguments: argparse.Namespace) -> int:
    from hetero_framework.commands.init import Answers, run_wizard, write_config

    answers = Answers(
        model=arguments.model,
        workers=arguments.worker,
        coordinator=arguments.coordinator,
        layers=arguments.layers,
        adapter=arguments.adapter,
        data=arguments.data,
    )
    output = Path(arguments.output)
    if not arguments.non_interactive:
        return run_wizard(answers, output, force=arguments.force)
    write_config(answers, output, force=arguments.force)
    print(f"wrote {output}; next: hetero check --config {output}")
    return 0


# -- check ----------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    parser = _command(
        commands,
        "check",
        _run_check,
        "validate a configuration; say what each machine does and how much memory it needs",
        """
        hetero check
        hetero check --config hetero_config.json --json
        hetero check --set training.per_device_train_batch_size=4
        """,
    )
    _add_config(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_check(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from hetero_framework.commands.check import check, text

    found = check(config)
    print(json.dumps(found, indent=2) if arguments.json else printable(text(found)))
    return 0


# -- train and worker -----------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    parser = _command(
        commands,
        "train",
        _run_train,
        "train; the same command on every machine",
        """
        hetero train --config hetero_config.json
        hetero train --resume latest
        hetero train --role worker --worker-id 2
        hetero train --output-dir runs/second --set training.learning_rate=1e-4
        """,
    )
    _add_config(parser)
    parser.add_argument("--output-dir", metavar="DIR", help="instead of training.output_dir")
    parser.add_argument(
        "--resume", type=_resume_step, metavar="latest|N", help="continue from a checkpoint"
    )
    parser.add_argument(
        "--role",
        choices=("coordinator", "worker"),
        help="what this machine is (default: by its addresses and host name)",
    )
    parser.add_argument("--worker-id", metavar="ID", help="which worker this process is")
    _add_import(parser)


def _run_train(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from hetero_framework.cluster.roles import decide_role

    role = decide_role(config, role=arguments.role, worker_id=arguments.worker_id)
    _import_files(arguments)
    if not role.is_coordinator:
        return _serve(config, role.worker_ids, debug=arguments.debug)
    config.require("model", "data")
    from hetero_framework.cluster.local_workers import LocalWorkers

    with LocalWorkers(config, role.worker_ids, debug=arguments.debug) as workers:
        try:
            # They import torch while this process does; `train` says what is wrong with output_dir.
            with contextlib.suppress(ResourceError):
                workers.start()
            from hetero_framework.trainer.coordinator import train

            train(config, resume=arguments.resume, debug=arguments.debug, workers=workers)
        except KeyboardInterrupt:  # while the libraries are imported
            raise StoppedEarly("stopped before the run began") from None
    return 0


def _add_worker(commands: Any) -> None:
    parser = _command(
        commands,
        "worker",
        _run_worker,
        "serve the layers of this machine's worker entries",
        """
        hetero worker --config hetero_config.json
        hetero worker --config hetero_config.json --worker-id 2
        hetero worker --keep
        """,
    )
    _add_config(parser)
    parser.add_argument("--worker-id", metavar="ID", help="which worker this process is")
    parser.add_argument("--keep", action="store_true", help="wait for the next run after each")
    _add_import(parser)
    parser.add_argument("--base-dir", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run-id", help=argparse.SUPPRESS)


def _run_worker(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from hetero_framework.cluster.roles import decide_role

    role = decide_role(config, role="worker", worker_id=arguments.worker_id)
    _import_files(arguments)
    return _serve(
        config,
        role.worker_ids,
        keep=arguments.keep,
        debug=arguments.debug,
        supervised=arguments.supervised,
        run_id=arguments.run_id,
    )


def _serve(
    config: Any,
    worker_ids: Sequence[int | str],
    *,
    keep: bool = False,
    debug: bool,
    supervised: bool = False,
    run_id: str | None = None,
) -> int:
    if len(worker_ids) > 1:
        from hetero_framework.cluster.local_workers import run_workers

        return run_workers(config, worker_ids, keep=keep, debug=debug)
    from hetero_framework.cluster.roles import threads_for

    # Before torch is imported, which reads it once.
    os.environ["OMP_NUM_THREADS"] = str(threads_for(config, worker_ids[0]))
    from hetero_framework.cluster.worker import serve
    from hetero_framework.engine.loading import load_stages

    logs = None
    if supervised:
        from hetero_framework.cluster.local_workers import watch_parent

        # After the imports: on Windows they would wait for a thread that reads standard input.
        watch_parent()
        logs = config.output_dir / "logs"
    serve(config, worker_ids[0], build=load_stages, keep=keep, logs=logs, run_id=run_id)
    return 0


# -- diagram, timeline, verify, merge -------------------------------------------------------------


def _add_diagram(commands: Any) -> None:
    parser = _command(
        commands,
        "diagram",
        _run_diagram,
        "draw the machines and who holds which layers",
        """
        hetero diagram --format svg --output architecture.svg
        hetero diagram --config hetero_config.json --format mmd --output -
        """,
    )
    _add_config(parser)
    parser.add_argument(
        "--format",
        choices=("png", "svg", "pdf", "mmd"),
        help="default: by --output, else training.visualization_format; png and pdf need Graphviz",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help='file to write, "-" for Mermaid text on the screen (default: architecture.FORMAT)',
    )


def _run_diagram(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from hetero_framework.visualizer.diagram import Diagram, draw, to_mermaid

    if arguments.output == "-":
        if arguments.format not in (None, "mmd"):
            raise UserError("only Mermaid text can be printed; use --format mmd or --output FILE")
        print(to_mermaid(Diagram.of(config)).rstrip())
        return 0
    form = arguments.format
    if form is None and arguments.output is None:
        form = config.training.visualization_format
    output = arguments.output or f"architecture.{form}"
    print(draw(config, output, form))
    return 0


def _add_timeline(commands: Any) -> None:
    parser = _command(
        commands,
        "timeline",
        _run_timeline,
        "where the time of a run's steps went, and what would help most; draws a step",
        """
        hetero timeline runs/default
        hetero timeline runs/default --json
        hetero timeline runs/default --step 3 --output step3.svg
        """,
    )
    parser.add_argument("place", metavar="RUN", help="output_dir of a run, or its timeline.json")
    parser.add_argument("--step", type=int, metavar="N", help="draw this step (default: the last)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), help="default: by --output")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="picture to write (default: timeline.png beside timeline.json)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; draw only with --output")


def _run_timeline(arguments: argparse.Namespace) -> int:
    from hetero_framework.profiling.bottleneck import diagnose, text
    from hetero_framework.profiling.picture import picture
    from hetero_framework.profiling.trace_file import read_timeline
    from hetero_framework.visualizer.timeline_picture import can_draw, draw

    trace = read_timeline(arguments.place)
    found = diagnose(trace)
    steps = [step + 1 for step in trace.steps]
    step = arguments.step if arguments.step is not None else found.steps[-1]
    if step not in steps:
        raise UserError(
            f"step {step} was not recorded",
            hint=f"recorded: {', '.join(map(str, steps))}; training.timeline_steps says how many",
        )
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else printable(text(found)))
    if arguments.output is None:
        if arguments.json:
            return 0
        if not can_draw():
            print('\nno picture: it needs matplotlib (pip install "hetero-framework[pictures]")')
            return 0
    place = Path(arguments.place)
    folder = place if place.is_dir() else place.parent
    output = arguments.output or folder / f"timeline.{arguments.format or 'png'}"
    file = draw(picture(trace, step - 1), output, arguments.format)
    if not arguments.json:
        print(f"\ndrawn: step {step} in {file}")
    return 0


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands,
        "verify",
        _run_verify,
        "cut a model and compare it with the whole: loss, gradients, three training steps",
        """
        hetero verify --config hetero_config.json
        hetero verify --model-type qwen3 --cuts 1,2
        hetero verify --all
        """,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--config", metavar="FILE", help=f"the configured model ({DEFAULT_CONFIG})")
    what.add_argument("--model-type", metavar="NAME", help="a tiny random model of this type")
    what.add_argument(
        "--all", action="store_true", help="every causal LM architecture that is installed"
    )
    parser.add_argument("--cuts", type=_cuts, metavar="2,5", help="cut before these layers")
    parser.add_argument(
        "--output", metavar="FILE", help="with --all: where the table goes (docs/architectures.md)"
    )
    parser.set_defaults(set=[])


def _run_verify(arguments: argparse.Namespace) -> int:
    if arguments.all and arguments.cuts:
        raise UserError("--cuts goes with --config or --model-type; --all chooses its own")
    if arguments.output and not arguments.all:
        raise UserError("--output goes with --all")
    config = None
    if not (arguments.all or arguments.model_type):
        arguments.config = arguments.config or DEFAULT_CONFIG
        config = _load(arguments)
        config.require("model")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order
    from hetero_framework.models import equivalence

    if arguments.all:
        output = Path(arguments.output or "docs/architectures.md")
        equivalence.write_architectures(equivalence.verify_all(_print_result), output)
        print(f"wrote {output}")
        return 0
    result = equivalence.verify_model(config, model_type=arguments.model_type, cuts=arguments.cuts)
    _print_result(result)
    return 0 if result.passed else UserError.exit_code


def _print_result(result: Any) -> None:
    from hetero_framework.config import layers_text

    cuts = " | ".join(layers_text(rng.start, rng.end) for rng in result.stages)
    numbers = (
        f"differences: loss {result.loss_difference:.1e}, gradients"
        f" {result.gradient_difference:.1e}, weights {result.weight_difference:.1e}"
    )
    subject = f"{result.model_type} ({result.subject}): {result.verdict}"
    parts = [subject, cuts, numbers]
    print(printable("; ".join(part for part in [*parts, result.reason] if part)), flush=True)


def _add_merge(commands: Any) -> None:
    parser = _command(
        commands,
        "merge",
        _run_merge,
        "fold an adapter into its model and write a checkpoint",
        """
        hetero merge --adapter runs/llama8b/adapter --model meta-llama/Llama-3.1-8B --output merged
        """,
    )
    parser.add_argument("--adapter", required=True, metavar="DIR", help="PEFT adapter directory")
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="model directory or hub name"
    )
    _add_output_directory(parser)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the result (default: that of the model)",
    )


def _add_output_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier result in DIR; other files in it stay",
    )


def _run_merge(arguments: argparse.Namespace) -> int:
    from hetero_framework.models.export import OutputDirectory
    from hetero_framework.models.merge import merge_adapter

    merge_adapter(
        Path(arguments.adapter),
        arguments.model,
        OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite),
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    print(f"wrote {arguments.output}")
    return 0


def _add_export(commands: Any) -> None:
    parser = _command(
        commands,
        "export",
        _run_export,
        "write the adapter or model of a checkpoint, without workers",
        """
        hetero export --checkpoint runs/default/checkpoints/step_500 --output step500
        hetero export --checkpoint runs/default --output latest
        """,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step_N directory, or the output_dir of a run (its latest)",
    )
    _add_output_directory(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="where model and tokenizer are now (default: as the run had them)",
    )


def _run_export(arguments: argparse.Namespace) -> int:
    from hetero_framework.commands.export import export_checkpoint
    from hetero_framework.models.export import OutputDirectory

    output = OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite)
    config = Path(arguments.config) if arguments.config is not None else None
    reader = export_checkpoint(Path(arguments.checkpoint), output, config)
    print(f"wrote {arguments.output}: the result of step {reader.step}")
    return 0


# -- doctor and schema ----------------------------------------------------------------------------


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        _run_doctor,
        "devices, versions, and what this machine can do",
        """
        hetero doctor
        hetero doctor --json
        """,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_doctor(arguments: argparse.Namespace) -> int:
    from hetero_framework.commands.doctor import examine, text

    found = examine()
    print(json.dumps(found, indent=2) if arguments.json else printable(text(found)))
    return 0


# -- bench ----------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        _run_bench,
        "measure this configuration's machines: links, seconds per layer, and the step they make",
        """
        hetero bench --config hetero_config.json
        hetero bench --config hetero_config.json --steps 8 --mb 32 --json
        """,
    )
    _add_config(parser)
    parser.add_argument(
        "--steps",
        type=_at_least(2),
        default=4,
        metavar="N",
        help="training steps to compute and forget; the first does not count (default 4)",
    )
    parser.add_argument(
        "--mb",
        type=_at_least(1),
        default=8,
        metavar="N",
        help="size of the messages that measure the links, in 10^6 bytes (default 8)",
    )
    parser.add_argument(
        "--role",
        choices=("coordinator",),
        help="what this machine is (default: by its addresses and host name)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_bench(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from hetero_framework.cluster.roles import decide_role

    role = decide_role(config, role=arguments.role)
    if not role.is_coordinator:
        names = " and ".join(f"worker {worker}" for worker in role.worker_ids)
        raise UserError(
            f"this machine is {names}; hetero bench runs on the coordinator's",
            hint="here, run hetero worker",
        )
    from hetero_framework.commands.bench import bench, text

    found = bench(config, steps=arguments.steps, nbytes=arguments.mb * 10**6)
    print(json.dumps(found, indent=2) if arguments.json else printable(text(found)))
    return 0


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def _add_schema(commands: Any) -> None:
    _command(
        commands,
        "schema",
        _run_schema,
        "print the JSON Schema of hetero_config.json",
        """
        hetero schema > hetero_config.schema.json
        """,
    )


def _run_schema(arguments: argparse.Namespace) -> int:
    from hetero_framework.config import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


# -- shared ---------------------------------------------------------------------------------------


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    lines = [line[8:] for line in examples.strip("\n").splitlines()]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}".rstrip() for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a setting of the file, as in training.max_steps=10; may be repeated",
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="FILE",
        help="run a Python file first that registers control messages (docs/extending.md)",
    )


def _import_files(arguments: argparse.Namespace) -> None:
    if arguments.imports:
        from hetero_framework import control

        for file in arguments.imports:
            control.import_file(Path(file))


def _load(arguments: argparse.Namespace) -> Any:
    from hetero_framework.config import load_config

    overrides = list(arguments.set)
    if getattr(arguments, "output_dir", None):
        # A path on the command line starts at the current directory, one in the file at the file.
        path = Path(arguments.output_dir).absolute()
        overrides.append(f"training.output_dir={json.dumps(str(path))}")
    config = load_config(arguments.config, overrides, getattr(arguments, "base_dir", None))
    set_level(config.training.log_level)
    return config


def _resume_step(text: str) -> int | str:
    if text == "latest":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither "latest" nor a step number')


def _cuts(text: str) -> tuple[int, ...]:
    try:
        cuts = tuple(int(part) for part in text.split(","))
    except ValueError:
        cuts = ()
    if not cuts or list(cuts) != sorted(set(cuts)) or cuts[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a growing list of layers like 2,5")
    return cuts


def _say_error(message: str, kind: str = "error") -> None:
    lines = [one_line(line) for line in message.splitlines()] or [""]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[: _MAX_MESSAGE_LINES - 1], "  ... (all of it with --debug)"]
    with contextlib.suppress(OSError):
        print(f"hetero: {kind}: " + "\n".join(lines), file=sys.stderr, flush=True)


def _use_utf8() -> None:
    """Let file names and model names print anywhere; a console's own encoding may lack them."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
