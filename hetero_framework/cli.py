"""The `hetero` command: one function per subcommand, heavy imports inside.

`main` is the one place that turns exceptions into a message and an exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework import errors, repository, versions
from hetero_framework._version import __version__
from hetero_framework.commands import plan_options
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    DEFAULT_CONFIG,
    JSON,
    KEYS,
    ROLE_HELP,
    WORKER_ID,
    Option,
    access_for,
    at_least,
    check_coordinator,
    flag,
    island_access_for,
    key_options,
    load,
    option,
    processes_here,
    repeated,
    report,
)
from hetero_framework.commands.preflight import preflight
from hetero_framework.errors import GroupFinished, HeteroError, StoppedEarly, UserError
from hetero_framework.log import Lines, log_to, one_line, printable, to_stderr
from hetero_framework.trainer.signals import STOPPED, StopRequest, hearing

_PATHS = (
    *("config", "keys", "output", "output_dir", "adapter", "checkpoint", "place"),
    *("profile", "save_profile", "evaluate", "picture"),
)
INTERRUPTED = 130  # what a shell reports for SIGINT
_MAX_MESSAGE_LINES = 40
_ANY_VERSION = ("doctor", "schema", "init")  # they work without the libraries, or say what they are
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    with hearing(words) as stop:
        return _main(words, stop)
    return STOPPED


def _main(words: Sequence[str], stop: StopRequest | None) -> int:
    _prepare_screens()
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = _did_you_mean(words[0], COMMANDS)
        parser.error(f"there is no command {words[0]!r}{near or '; hetero --help lists them'}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:  # said with the usage of the command, not with that of all commands
        own = getattr(arguments, "parser", parser)
        options = [name for action in own._actions for name in action.option_strings]
        near = _did_you_mean(unknown[0].partition("=")[0], options)
        own.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    if arguments.command is None:
        parser.print_help()
        return 2
    for name in _PATHS:  # a shell does not replace ~ in --output=~/x
        if isinstance(value := getattr(arguments, name, None), str):
            setattr(arguments, name, os.path.expanduser(value))
    try:
        if arguments.command not in _ANY_VERSION:
            versions.check()
        with log_to("INFO", Lines(to_stderr)):
            code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # `hetero ... | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        if arguments.debug:
            traceback.print_exc()
        if stop is not None:
            raise
        _say_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = errors.as_hetero_error(error)
        if known is not None:
            kind = _KINDS.get(type(known), "error")
            _say_error(str(known).removeprefix("stopped "), kind=kind)
            return known.exit_code
        _say_error(
            f"{type(error).__name__}: {error}\n  This is a bug; run with --debug for details."
        )
        return HeteroError.exit_code


_KINDS: dict[type[HeteroError], str] = {StoppedEarly: "stopped", GroupFinished: "done"}
"""What ends a command and is no mistake."""


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The command line; needs no heavy import."""
    parser = argparse.ArgumentParser(
        prog="hetero",
        description="Train one language model over several machines.",
        epilog="Exit codes: 0 done, 1 a bug, 2 what you can fix, 3 identity or keys,"
        " 4 peers lost, 5 numeric,"
        " 6 memory or disk, 75 stopped early and resumable.",
    )
    parser.add_argument("--version", action="version", version=f"hetero {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=f"examples:\n{command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(parser=own)
        for names, settings in (flag("--debug", "show tracebacks"), *command.options):
            own.add_argument(*names, **settings)
    return parser


_Run = Callable[[argparse.Namespace], "int | None"]


@dataclass(frozen=True)
class _Command:
    run: _Run
    summary: str
    examples: str
    options: tuple[Option, ...]


COMMANDS: dict[str, _Command] = {}


def _command(summary: str, examples: str, *options: Option) -> Callable[[_Run], _Run]:
    """Make `_run_NAME` or `run_NAME` the subcommand NAME; it returns an exit code, None for 0."""
    shown = textwrap.indent(textwrap.dedent(examples).strip(), "  ")

    def add(run: _Run) -> _Run:
        name = run.__name__.lstrip("_").removeprefix("run_")
        COMMANDS[name] = _Command(run, summary, shown, options)
        return run

    return add


def _resume_step(text: str) -> int | str:
    if text == "latest":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither "latest" nor a step number')


def _cuts(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        cuts = tuple(int(part) for part in text.split(","))
        if list(cuts) == sorted(set(cuts)) and cuts[0] >= 0:
            return cuts
    raise argparse.ArgumentTypeError(f"{text!r} is not a growing list of layers like 2,5")


_IMPORT = repeated(
    "--import",
    "FILE",
    "run a Python file first that registers control messages (docs/maintainers/extending.md)",
    dest="imports",
)
_OUTPUT_DIRECTORY = (
    option("--output", required=True, metavar="DIR", help="new directory"),
    flag("--overwrite", "replace an earlier result in DIR; other files in it stay"),
)
_ADDRESS = "HOST[:PORT[:DEVICE]]"
_WORKER = "a worker (PORT -: it dials the coordinator); may be given several times"


@_command(
    "write a configuration, by questions or from options",
    """
    hetero init
    hetero init --non-interactive --model meta-llama/Llama-3.1-8B \\
        --worker 192.168.1.20:9999:cuda:0 --worker [fd00::2]:9999 --adapter qlora \\
        --data train.jsonl
    hetero init --non-interactive --model ./model --worker localhost:29501 --adapter none
    hetero init --island garage --lighthouse 192.168.1.10:29510
    """,
    flag("--non-interactive", "ask nothing"),
    option("--model", metavar="NAME", help="model directory or hub name"),
    repeated("--worker", _ADDRESS, _WORKER, dest="workers"),
    option("--coordinator", metavar=_ADDRESS, help="the coordinator (default: this machine)"),
    option("--layers", type=int, metavar="N", help="number of layers (default: of the model)"),
    flag("--measure", "no even split: a run measures the machines when it begins, and plans"),
    option("--adapter", choices=("lora", "qlora", "none"), help="what to train (default: lora)"),
    option("--data", metavar="FILE", help="training data: file or dataset name"),
    option("--island", metavar="NAME", help="train together with other coordinators, as this one"),
    option(
        "--lighthouse",
        metavar="HOST:PORT",
        help="where islands find each other (default: 127.0.0.1:29510)",
    ),
    option("--output", default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}"),
    flag("--force", "replace an existing file"),
)
def _run_init(arguments: argparse.Namespace) -> int | None:
    from hetero_framework.commands.init import (
        Answers,
        precision_lines,
        run_wizard,
        write_config,
    )

    given = vars(arguments)
    names = ("model", "workers", "coordinator", "layers", "adapter", "data", "island", "lighthouse")
    # Not given, it is asked about.
    answers = Answers(**{name: given[name] for name in names}, measure=arguments.measure or None)
    output = Path(arguments.output)
    if not arguments.non_interactive:
        code = run_wizard(answers, output, force=arguments.force)
        _prepare_keys(load(argparse.Namespace(config=output)), output)
        return code
    config = write_config(answers, output, force=arguments.force)
    for line in precision_lines(config):
        print(line)
    print(f"wrote {output}; next: hetero check --config {output}")
    _prepare_keys(config, output)
    return 0


def _prepare_keys(config: Any, output: Path) -> None:
    """Where other machines take part, each needs a key."""
    from hetero_framework.commands.keys import prepare_keys
    from hetero_framework.core import addresses
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    keys = KeyDirectory(output.absolute().parent / FOLDER)
    made = prepare_keys(config, keys)
    remote = [str(w.id) for w in config.planned_workers if not addresses.is_local_address(w.ip)]
    if made:
        print(f"made this cluster's authority and this machine's key: {keys.path}")
    if remote:
        print(f"invite the other machines: hetero invite {' '.join(remote)} --config {output}")
    island = config.island
    if island is not None and not addresses.is_loopback(island.lighthouse_address[0]):
        print(
            "have this island invited, on the lighthouse's machine: hetero invite --island"
            f" {island.name}"
        )


@_command(
    "validate configuration, model and data; say what each machine does and what memory it needs",
    """
    hetero check
    hetero check --show 3
    hetero check --config hetero_config.json --json
    hetero check --set training.per_device_train_batch_size=4
    """,
    *CONFIG,
    option(
        "--show",
        type=at_least(1),
        default=0,
        metavar="N",
        help="print the first N examples: their tokens, what the loss covers, what is left out",
    ),
    JSON,
)
def _run_check(arguments: argparse.Namespace) -> None:
    config = load(arguments)
    preflight(config, data=False)
    from hetero_framework.commands.check import check, text
    from hetero_framework.visualizer.examples import print_examples

    found = check(config, show=arguments.show)
    report(arguments, found, text)
    if found["examples"] and not arguments.json:
        print()
        print_examples(found["examples"])


@_command(
    "train; the same command on every machine",
    """
    hetero train --config hetero_config.json
    hetero train --resume latest
    hetero train --role worker --worker-id 2
    hetero train --output-dir runs/second --set training.learning_rate=1e-4
    """,
    *CONFIG,
    option("--output-dir", metavar="DIR", help="instead of training.output_dir"),
    option("--resume", type=_resume_step, metavar="latest|N", help="continue from a checkpoint"),
    flag("--fresh", "begin anew where an earlier run was cut short"),
    flag("--replan", "go on without workers that stay away, and take them back"),
    option("--role", choices=("coordinator", "worker"), help=ROLE_HELP),
    WORKER_ID,
    *ACCESS,
    _IMPORT,
)
def _run_train(arguments: argparse.Namespace) -> int | None:
    config = load(arguments, kept_plan=False)
    from hetero_framework.cluster.roles import decide_role

    keys = processes_here(config, arguments)
    role = decide_role(config, role=arguments.role, worker_id=arguments.worker_id, keys=keys)
    _import_files(arguments)
    if not role.is_coordinator:
        return _serve(config, role.worker_ids, arguments)
    config.require("model", "data")
    access = access_for(config, "local", arguments)
    islands = island_access_for(config, arguments)
    config.spare_base_model()
    preflight(config, writes=True)
    config = _planned(config, arguments, access)
    from hetero_framework.cluster.child import PROGRAM
    from hetero_framework.cluster.local_workers import LocalWorkers
    from hetero_framework.cluster.run_id import run_id_of
    from hetero_framework.trainer.signals import StopRequest

    workers = None
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        try:
            # They import torch while this process does; `train` says what is wrong with output_dir.
            with contextlib.suppress(OSError, errors.ResourceError):
                run_id, planned = run_id_of(config.output_dir), config.plan.owners
                ids = [worker for worker in role.worker_ids if worker in planned]
                program = (*PROGRAM, *access.arguments(ids))
                workers = LocalWorkers(
                    config, ids, debug=arguments.debug, run_id=run_id, program=program
                )
                stack.enter_context(workers).start()
            _log.info("this is the coordinator; torch and transformers are loaded now")
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
    return 0


def _planned(config: Any, arguments: argparse.Namespace, access: Any) -> Any:
    """With a plan where shard_plan is "auto": that of the run that goes on, else a new one."""
    if config.is_planned:
        return config
    from hetero_framework.config import with_kept_plan
    from hetero_framework.trainer.outputs import UNFINISHED_FILE

    is_unfinished = (config.output_dir / UNFINISHED_FILE).exists() and not arguments.fresh
    if arguments.resume or config.resume_step or is_unfinished:
        config = with_kept_plan(config)
    if config.is_planned:
        return config
    from hetero_framework.commands.auto_plan import plan_run

    return plan_run(config, access)


@_command(
    "serve the layers of this machine's worker entries",
    """
    hetero worker --config hetero_config.json
    hetero worker --config hetero_config.json --worker-id 2
    hetero worker --keep
    """,
    *CONFIG,
    WORKER_ID,
    *ACCESS,
    flag("--keep", "wait for the next run after each"),
    _IMPORT,
    option("--base-dir", help=argparse.SUPPRESS),
    flag("--supervised", argparse.SUPPRESS),
    option("--run-id", help=argparse.SUPPRESS),
)
def _run_worker(arguments: argparse.Namespace) -> int | None:
    config = load(arguments, kept_plan=False)
    from hetero_framework.cluster.roles import decide_role

    keys = processes_here(config, arguments)
    role = decide_role(config, role="worker", worker_id=arguments.worker_id, keys=keys)
    _import_files(arguments)
    return _serve(
        config,
        role.worker_ids,
        arguments,
        keep=arguments.keep,
        supervised=arguments.supervised,
        run_id=arguments.run_id,
    )


def _serve(
    config: Any,
    worker_ids: Sequence[int | str],
    arguments: argparse.Namespace,
    *,
    keep: bool = False,
    supervised: bool = False,
    run_id: str | None = None,
) -> int:
    access = access_for(config, worker_ids[0], arguments)
    if not supervised:
        from hetero_framework.cluster.child import PROGRAM
        from hetero_framework.cluster.supervisor import run_workers

        for worker_id in worker_ids[1:]:
            access_for(config, worker_id, arguments)
        program = (*PROGRAM, *access.arguments(worker_ids))
        return run_workers(config, worker_ids, keep=keep, debug=arguments.debug, program=program)
    from hetero_framework.cluster.child import watch_parent
    from hetero_framework.cluster.orders import Orders
    from hetero_framework.cluster.roles import threads_for

    # Before torch is imported, which reads it once.
    os.environ["OMP_NUM_THREADS"] = str(threads_for(config, worker_ids[0]))
    from hetero_framework.cluster.worker import serve
    from hetero_framework.engine.loading import load_stages

    # After the imports: on Windows they would wait for a thread that reads standard input.
    orders = Orders()
    watch_parent(on_order=orders.from_parent)
    logs = config.output_dir / "logs"
    serve(
        config,
        worker_ids[0],
        build=load_stages,
        keep=keep,
        logs=logs,
        run_id=run_id,
        orders=orders,
        access=access,
    )
    return 0


@_command(
    "train twice, the second time with processes of this machine killed, and compare the results",
    """
    hetero chaos --config cluster.json
    hetero chaos --steps 40 --kills 6 --seed 3 --output-dir runs/chaos
    """,
    *CONFIG,
    option("--output-dir", metavar="DIR", default="runs/chaos", help="default: runs/chaos"),
    option("--steps", type=int, default=20, help="of each of the two runs (default: 20)"),
    option("--kills", type=int, default=4, help="processes to kill (default: 4)"),
    option("--seed", type=int, default=0, help="says who is killed after which step"),
    JSON,
)
def _run_chaos(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.output_dir)
    arguments.output_dir = None  # of the two runs, not of the configuration
    config = load(arguments)
    config.require("model", "data")
    from dataclasses import asdict

    from hetero_framework.commands.chaos import chaos, text

    options = ["--config", arguments.config]
    for setting in arguments.set:
        options += ["--set", setting]
    verdict = chaos(
        config,
        directory,
        steps=arguments.steps,
        kills=arguments.kills,
        seed=arguments.seed,
        options=options,
    )
    report(arguments, asdict(verdict), text)
    return 0 if verdict.same else HeteroError.exit_code


_PAUSE_OPTIONS = (
    option("worker_id", metavar="ID", help="the worker, as the configuration names it"),
    option(
        "--address",
        metavar="HOST:PORT",
        help="where it listens, if several workers of that name are served here",
    ),
)


@_command(
    "free this machine of a worker for a while: its state goes to the run, its process ends",
    """
    hetero pause 1
    hetero pause 1 --address 192.168.1.20:9999
    """,
    *_PAUSE_OPTIONS,
)
def _run_pause(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.pause import pause

    print(pause(arguments.worker_id, arguments.address))


@_command(
    "start a paused worker of this machine again; its run goes on by itself",
    """
    hetero resume 1
    hetero resume 1 --address 192.168.1.20:9999
    """,
    *_PAUSE_OPTIONS,
)
def _run_resume(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.pause import resume

    print(resume(arguments.worker_id, arguments.address))


@_command(
    "print the line that makes another machine a worker or an island, and wait until it has joined",
    """
    hetero invite 1
    hetero invite 1 2 --config cluster.json
    hetero invite --island garage --bind 192.168.1.10
    """,
    option("workers", metavar="ID", nargs="*", help="a worker of the configuration"),
    repeated(
        "--island",
        "NAME",
        "an island's coordinator, on the machine of the lighthouse; may be given several times",
        dest="islands",
    ),
    *CONFIG,
    KEYS,
    option("--port", type=at_least(1), metavar="N", help="instead of the coordinator's"),
    option(
        "--bind",
        metavar="HOST",
        help="with --island: the address of this machine that islands reach (default: that of"
        " island.lighthouse, where there is a configuration; else of its first interface)",
    ),
)
def _run_invite(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands import keys as command

    file, keys, port = Path(arguments.config), _keys(arguments), arguments.port
    if bool(arguments.workers) == bool(arguments.islands):
        raise UserError("hetero invite takes IDs of workers or --island NAME")
    if arguments.bind is not None and not arguments.islands:
        raise UserError("--bind HOST goes with hetero invite --island")
    if not arguments.islands:
        command.invite(load(arguments), file, keys, arguments.workers, port)
        return
    config = load(arguments) if file.exists() else None
    address = command.lighthouse_address(config, arguments.bind)
    command.invite_islands(keys.of_islands, arguments.islands, address, port)


@_command(
    "where islands find each other: coordinators that train one model together",
    """
    hetero lighthouse
    hetero lighthouse --bind 192.168.1.10:29510 --min-islands 2
    """,
    option(
        "--bind",
        default="127.0.0.1:29510",
        metavar="HOST:PORT",
        help="where it listens, and islands have as island.lighthouse (default: 127.0.0.1:29510)",
    ),
    option(
        "--min-islands",
        type=at_least(1),
        default=1,
        metavar="N",
        help="fewer than these are told of nobody, and wait (default 1)",
    ),
    option("--keys", metavar="DIR", help="default: hetero_keys; those of islands are in it"),
    ACCESS[1],
)
def _run_lighthouse(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.lighthouse import serve
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    keys = KeyDirectory(Path(arguments.keys or FOLDER).absolute())
    serve(arguments.bind, arguments.min_islands, keys.of_islands, key_options(arguments))


@_command(
    "make this machine a worker or an island, with the line that `hetero invite` has printed",
    "hetero join 192.168.1.10:9998 HT1-...",
    option("address", metavar="HOST:PORT", help="where `hetero invite` waits"),
    option("token", metavar="TOKEN", help="HT1-..."),
    option("--config", default=DEFAULT_CONFIG, metavar="FILE", help="where a worker's is written"),
    KEYS,
)
def _run_join(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.keys import join_cluster

    file = Path(arguments.config)
    joined = join_cluster(arguments.address, arguments.token, file, _keys(arguments))
    more = "" if arguments.config == DEFAULT_CONFIG else f" --config {file}"
    more += f" --keys {arguments.keys}" if arguments.keys else ""
    if joined.identity.island is not None:
        print(f"this machine is {joined.identity}; its key is here. Next: hetero train{more}")
        return
    print(f"this machine is {joined.identity}; {file} is here. Next: hetero train{more}")


@_command(
    "list, check, revoke or rotate the keys of this machine; export keys of others as files",
    """
    hetero keys list
    hetero keys check
    hetero keys revoke 2
    hetero keys rotate
    hetero keys export 1 2 --output for-the-boxes
    hetero keys revoke garage --islands
    """,
    option("action", choices=("list", "check", "revoke", "rotate", "export")),
    option(
        "workers",
        metavar="ID",
        nargs="*",
        help="for revoke, also coordinator or lighthouse; for export",
    ),
    flag("--islands", "the keys of islands and their lighthouse, not of workers"),
    *CONFIG,
    KEYS,
    option("--output", metavar="DIR", help="for export: where worker-ID.pem are written"),
)
def _run_keys(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands import keys as command

    action, keys, workers = arguments.action, _keys(arguments), arguments.workers
    if arguments.islands:
        keys = keys.of_islands
    if (action == "revoke") != (len(workers) == 1) and action != "export":
        raise UserError(f"hetero keys {action} takes {'one ID' if action == 'revoke' else 'no ID'}")
    if (action == "export") != (arguments.output is not None):
        raise UserError("--output DIR goes with hetero keys export, which needs it")
    if action == "list":
        print(printable(command.listing(keys)))
    elif action == "revoke":
        print(command.revoke(keys, workers[0]))
    elif action == "rotate":
        print(command.rotate(keys))
    elif action == "check":
        print(command.check(None if arguments.islands else load(arguments), keys))
    else:
        output = Path(arguments.output)
        if arguments.islands:
            files, folder = command.export_islands(keys, workers, output), "hetero_keys/islands"
        else:
            files, folder = command.export(load(arguments), keys, workers, output), "hetero_keys"
        for file in files:
            print(f"wrote {file}; it belongs into {folder} on its machine (chmod 600)")


def _keys(arguments: argparse.Namespace) -> Any:
    """The key directory of a command."""
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    beside = Path(arguments.config).absolute().parent / FOLDER
    return KeyDirectory(Path(arguments.keys).absolute() if arguments.keys else beside)


@_command(
    "draw the machines and who holds which layers",
    """
    hetero diagram --format svg --output architecture.svg
    hetero diagram --config hetero_config.json --format mmd --output -
    """,
    *CONFIG,
    option(
        "--format",
        choices=("png", "svg", "pdf", "mmd"),
        help="default: by --output, else training.visualization_format; all but mmd, which is"
        " Mermaid text, are plainer without Graphviz",
    ),
    option(
        "--output",
        metavar="PATH",
        help='file to write, "-" for Mermaid text on the screen (default: architecture.FORMAT)',
    ),
)
def _run_diagram(arguments: argparse.Namespace) -> None:
    config = load(arguments)
    from hetero_framework.visualizer.diagram import Diagram, draw, to_mermaid

    if arguments.output == "-":
        if arguments.format not in (None, "mmd"):
            raise UserError("only Mermaid text can be printed; use --format mmd or --output FILE")
        print(to_mermaid(Diagram.of(config)).rstrip())
        return
    form = arguments.format
    if form is None and arguments.output is None:
        form = config.training.visualization_format
    print(draw(config, arguments.output or f"architecture.{form}", form))


_command(plan_options.SUMMARY, plan_options.EXAMPLES, *plan_options.OPTIONS)(plan_options.run_plan)


@_command(
    "measure this configuration's machines: links, seconds per layer, and the step they make",
    """
    hetero bench --config hetero_config.json
    hetero bench --config hetero_config.json --steps 8 --mb 32 --json
    """,
    *CONFIG,
    option(
        "--steps",
        type=at_least(2),
        default=4,
        metavar="N",
        help="training steps to compute and forget; the first does not count (default 4)",
    ),
    option(
        "--mb",
        type=at_least(1),
        default=8,
        metavar="N",
        help="size of the messages that measure the links, in 10^6 bytes (default 8)",
    ),
    option("--role", choices=("coordinator",), help=ROLE_HELP),
    *ACCESS,
    JSON,
)
def _run_bench(arguments: argparse.Namespace) -> None:
    config = load(arguments)
    check_coordinator(config, arguments)
    preflight(config, data=False)
    from hetero_framework.commands.bench import bench, text

    access, nbytes = access_for(config, "local", arguments), arguments.mb * 10**6
    found = bench(config, steps=arguments.steps, nbytes=nbytes, access=access)
    report(arguments, found, text)


@_command(
    "where the time of a run's steps went, and what would help most; draws a step",
    """
    hetero timeline runs/default
    hetero timeline runs/default --json
    hetero timeline runs/default --step 3 --output step3.svg
    """,
    option("place", metavar="RUN", help="output_dir of a run, or its timeline.json"),
    option("--step", type=int, metavar="N", help="draw this step (default: the last)"),
    option("--format", choices=("png", "svg", "pdf"), help="default: by --output"),
    option(
        "--output",
        metavar="PATH",
        help="picture to write (default: timeline.png beside timeline.json)",
    ),
    flag("--json", "print JSON; draw only with --output"),
)
def _run_timeline(arguments: argparse.Namespace) -> None:
    from hetero_framework.profiling import account
    from hetero_framework.profiling.between import read_between
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
    place = Path(arguments.place)
    folder = place if place.is_dir() else place.parent
    held = account.read_account(folder, found.steps)
    between = read_between(folder)
    figures = {**found.to_dict(), "account": held.to_dict() if held is not None else None}
    if between is not None:
        figures["islands"] = between.to_dict()
    shown = [text(found), *(["", *account.text(held)] if held is not None else [])]
    shown += ["", *between.text()] if between is not None else []
    report(arguments, figures, lambda _: "\n".join(shown))
    if arguments.output is None and arguments.json:
        return
    if arguments.output is None and not can_draw():
        print('\nno picture: it needs matplotlib (pip install "hetero-framework[pictures]")')
        return
    output = arguments.output or folder / f"timeline.{arguments.format or 'png'}"
    file = draw(picture(trace, step - 1), output, arguments.format)
    if not arguments.json:
        print(f"\ndrawn: step {step} in {file}")


@_command(
    "cut a model and compare it with the whole: loss, gradients, three training steps",
    """
    hetero verify --config hetero_config.json
    hetero verify --model-type qwen3 --cuts 1,2
    hetero verify --all
    """,
    option("--config", metavar="FILE", help=f"the configured model (default: {DEFAULT_CONFIG})"),
    option("--model-type", metavar="NAME", help="a tiny random model of this type or class"),
    flag("--all", "every causal LM architecture and multimodal class"),
    option("--cuts", type=_cuts, metavar="2,5", help="cut before these layers"),
    option(
        "--output", metavar="FILE", help="with --all: where the table goes (docs/architectures.md)"
    ),
)
def _run_verify(arguments: argparse.Namespace) -> int:
    if (arguments.config is not None) + (arguments.model_type is not None) + arguments.all > 1:
        raise UserError("give only one of --config, --model-type and --all")
    if arguments.all and arguments.cuts:
        raise UserError("--cuts goes with --config or --model-type; --all chooses its own")
    if arguments.output and not arguments.all:
        raise UserError("--output goes with --all")
    config = None
    if not (arguments.all or arguments.model_type):
        config = load(arguments)
        config.require("model")
        preflight(config, data=False)
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
    half = f"in bfloat16 autocast {result.half}" if result.half and result.passed else ""
    beside = f"crosses: {result.crossing}" if result.crossing else ""
    unused = f"left out: {', '.join(result.towers)}" if result.towers else ""
    parts = filter(None, (subject, cuts, numbers, result.reason, half, beside, unused))
    print(printable("; ".join(parts)), flush=True)


@_command(
    "fold an adapter into its model and write a checkpoint",
    "hetero merge --adapter runs/llama8b/adapter --model meta-llama/Llama-3.1-8B --output merged",
    option("--adapter", required=True, metavar="DIR", help="PEFT adapter directory"),
    option("--model", required=True, metavar="NAME", help="model directory or hub name"),
    *_OUTPUT_DIRECTORY,
    option("--revision", metavar="NAME", help="branch, tag or commit on the hub"),
    option(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the result (default: that of the model)",
    ),
)
def _run_merge(arguments: argparse.Namespace) -> None:
    if not Path(arguments.adapter).is_dir():
        raise UserError(f"there is no adapter directory {arguments.adapter}")
    repository.resolve_model_path(arguments.model, Path.cwd())
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


@_command(
    "write the adapter or model of a checkpoint, without workers",
    """
    hetero export --checkpoint runs/default/checkpoints/step_500 --output step500
    hetero export --checkpoint runs/default --output latest
    """,
    option(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step_N directory, or the output_dir of a run (its latest)",
    ),
    *_OUTPUT_DIRECTORY,
    option(
        "--config",
        metavar="FILE",
        help="where model and tokenizer are now (default: as the run had them)",
    ),
)
def _run_export(arguments: argparse.Namespace) -> None:
    if not Path(arguments.checkpoint).is_dir():
        raise UserError(
            f"there is no directory {arguments.checkpoint}",
            hint="give a step_N directory, or the output_dir of a run",
        )
    from hetero_framework.commands.export import export_checkpoint
    from hetero_framework.models.export import OutputDirectory

    output = OutputDirectory(Path(arguments.output), overwrite=arguments.overwrite)
    config = Path(arguments.config) if arguments.config is not None else None
    reader = export_checkpoint(Path(arguments.checkpoint), output, config)
    print(f"wrote {arguments.output}: the result of step {reader.step}")


@_command(
    "devices, versions, and what this machine can do; with --config, what would stop a run",
    """
    hetero doctor
    hetero doctor --config hetero_config.json
    hetero doctor --config hetero_config.json --worker-id 2 --json
    """,
    option(
        "--config",
        metavar="FILE",
        help="say what is wrong with this configuration's machines, seen from here, and what to do",
    ),
    WORKER_ID,
    *ACCESS,
    JSON,
)
def _run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.config is None:
        from hetero_framework.commands.doctor import examine, text

        report(arguments, examine(), text)
        return 0
    config = load(arguments)
    from hetero_framework.commands import diagnosis

    options = key_options(arguments)
    found = diagnosis.diagnose(config, worker_id=arguments.worker_id, options=options)
    report(arguments, found, diagnosis.text)
    return UserError.exit_code if found["findings"] else 0


@_command(
    "print the JSON Schema of hetero_config.json",
    "hetero schema > hetero_config.schema.json",
)
def _run_schema(arguments: argparse.Namespace) -> None:
    from hetero_framework.config import json_schema

    print(json.dumps(json_schema(), indent=2))


def _import_files(arguments: argparse.Namespace) -> None:
    if arguments.imports:
        from hetero_framework import control

        for file in arguments.imports:
            control.import_file(Path(file))


def _say_error(message: str, kind: str = "error") -> None:
    lines = [one_line(line) for line in message.splitlines()] or [""]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[: _MAX_MESSAGE_LINES - 1], "  ... (all of it with --debug)"]
    with contextlib.suppress(OSError):
        print(f"hetero: {kind}: " + "\n".join(lines), file=sys.stderr, flush=True)


def _prepare_screens() -> None:
    """Let file names and model names print anywhere: a console's own encoding may lack them, and a
    process may have been started without any screen (`1>&-`, a service)."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
