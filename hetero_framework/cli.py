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

from hetero_framework import errors, versions
from hetero_framework._version import __version__
from hetero_framework.errors import HeteroError, StoppedEarly, UserError
from hetero_framework.log import Lines, log_to, one_line, printable, set_level, to_stderr

DEFAULT_CONFIG = "hetero_config.json"
INTERRUPTED = 130  # what a shell reports for SIGINT
_MAX_MESSAGE_LINES = 40
_ANY_VERSION = ("doctor", "schema", "init")  # they work without the libraries, or say what they are
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _prepare_screens()
    parser = build_parser()
    words = sys.argv[1:] if argv is None else argv
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
        _say_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = errors.as_hetero_error(error)
        if known is not None:
            stopped = isinstance(known, StoppedEarly)
            _say_error(str(known).removeprefix("stopped "), kind="stopped" if stopped else "error")
            return known.exit_code
        _say_error(
            f"{type(error).__name__}: {error}\n  This is a bug; run with --debug for details."
        )
        return HeteroError.exit_code


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
        for names, settings in (_flag("--debug", "show tracebacks"), *command.options):
            own.add_argument(*names, **settings)
    return parser


_Option = tuple[tuple[str, ...], dict[str, Any]]
_Run = Callable[[argparse.Namespace], "int | None"]


@dataclass(frozen=True)
class _Command:
    run: _Run
    summary: str
    examples: str
    options: tuple[_Option, ...]


COMMANDS: dict[str, _Command] = {}


def _command(summary: str, examples: str, *options: _Option) -> Callable[[_Run], _Run]:
    """Make `_run_NAME` the subcommand NAME; it returns an exit code, or None for 0."""
    shown = textwrap.indent(textwrap.dedent(examples).strip(), "  ")

    def add(run: _Run) -> _Run:
        name = run.__name__.removeprefix("_run_")
        COMMANDS[name] = _Command(run, summary, shown, options)
        return run

    return add


def _option(*names: str, **settings: Any) -> _Option:
    return names, settings


def _flag(name: str, help: str) -> _Option:
    return _option(name, action="store_true", help=help)


def _files(name: str, metavar: str, help: str, **settings: Any) -> _Option:
    """An option that may be given several times."""
    return _option(name, action="append", default=[], metavar=metavar, help=help, **settings)


def _resume_step(text: str) -> int | str:
    if text == "latest":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither "latest" nor a step number')


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def _cuts(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        cuts = tuple(int(part) for part in text.split(","))
        if list(cuts) == sorted(set(cuts)) and cuts[0] >= 0:
            return cuts
    raise argparse.ArgumentTypeError(f"{text!r} is not a growing list of layers like 2,5")


_CONFIG = (
    _option("--config", default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}"),
    _files(
        "--set",
        "NAME=VALUE",
        "replace a setting of the file, as in training.max_steps=10; may be repeated",
    ),
)
_IMPORT = _files(
    "--import",
    "FILE",
    "run a Python file first that registers control messages (docs/extending.md)",
    dest="imports",
)
_KEYS = _option("--keys", metavar="DIR", help="default: hetero_keys beside the configuration")
_ACCESS = (
    _KEYS,
    _flag("--insecure-plaintext", "no encryption, and nobody is asked who it is; on all machines"),
)
_JSON = _flag("--json", "print JSON")
_WORKER_ID = _option("--worker-id", metavar="ID", help="which worker this process is")
_OUTPUT_DIRECTORY = (
    _option("--output", required=True, metavar="DIR", help="new directory"),
    _flag("--overwrite", "replace an earlier result in DIR; other files in it stay"),
)
_ADDRESS = "HOST[:PORT[:DEVICE]]"
_WORKER = "a worker (PORT -: it dials the coordinator); may be given several times"
_ROLE = "what this machine is (default: by its addresses and host name)"


@_command(
    "write a configuration, by questions or from options",
    """
    hetero init
    hetero init --non-interactive --model meta-llama/Llama-3.1-8B \\
        --worker 192.168.1.20:9999:cuda:0 --worker [fd00::2]:9999 --adapter qlora \\
        --data train.jsonl
    hetero init --non-interactive --model ./model --worker localhost:29501 --adapter none
    """,
    _flag("--non-interactive", "ask nothing"),
    _option("--model", metavar="NAME", help="model directory or hub name"),
    _files("--worker", _ADDRESS, _WORKER, dest="workers"),
    _option("--coordinator", metavar=_ADDRESS, help="the coordinator (default: this machine)"),
    _option("--layers", type=int, metavar="N", help="number of layers (default: of the model)"),
    _option("--adapter", choices=("lora", "qlora", "none"), help="what to train (default: lora)"),
    _option("--data", metavar="FILE", help="training data: file or dataset name"),
    _option("--output", default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}"),
    _flag("--force", "replace an existing file"),
)
def _run_init(arguments: argparse.Namespace) -> int | None:
    from hetero_framework.commands.init import Answers, run_wizard, write_config

    given = vars(arguments)
    names = ("model", "workers", "coordinator", "layers", "adapter", "data")
    answers = Answers(**{name: given[name] for name in names})
    output = Path(arguments.output)
    if not arguments.non_interactive:
        code = run_wizard(answers, output, force=arguments.force)
        _prepare_keys(_load(argparse.Namespace(config=output)), output)
        return code
    config = write_config(answers, output, force=arguments.force)
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


@_command(
    "validate a configuration; say what each machine does and how much memory it needs",
    """
    hetero check
    hetero check --config hetero_config.json --json
    hetero check --set training.per_device_train_batch_size=4
    """,
    *_CONFIG,
    _JSON,
)
def _run_check(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
    from hetero_framework.commands.check import check, text

    _report(arguments, check(config), text)


@_command(
    "train; the same command on every machine",
    """
    hetero train --config hetero_config.json
    hetero train --resume latest
    hetero train --role worker --worker-id 2
    hetero train --output-dir runs/second --set training.learning_rate=1e-4
    """,
    *_CONFIG,
    _option("--output-dir", metavar="DIR", help="instead of training.output_dir"),
    _option("--resume", type=_resume_step, metavar="latest|N", help="continue from a checkpoint"),
    _flag("--fresh", "begin anew where an earlier run was cut short"),
    _option("--role", choices=("coordinator", "worker"), help=_ROLE),
    _WORKER_ID,
    *_ACCESS,
    _IMPORT,
)
def _run_train(arguments: argparse.Namespace) -> int | None:
    config = _load(arguments)
    from hetero_framework.cluster.roles import decide_role

    keys = _processes(config, arguments)
    role = decide_role(config, role=arguments.role, worker_id=arguments.worker_id, keys=keys)
    _import_files(arguments)
    if not role.is_coordinator:
        return _serve(config, role.worker_ids, arguments)
    config.require("model", "data")
    access = _access(config, "local", arguments)
    config.spare_base_model()
    from hetero_framework.cluster.local_workers import PROGRAM, LocalWorkers
    from hetero_framework.cluster.run_id import run_id_of
    from hetero_framework.trainer.signals import StopRequest

    workers = None
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        try:
            # They import torch while this process does; `train` says what is wrong with output_dir.
            with contextlib.suppress(OSError, errors.ResourceError):
                run_id, ids = run_id_of(config.output_dir), role.worker_ids
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
                debug=arguments.debug,
                workers=workers,
                access=access,
            )
        except KeyboardInterrupt:  # while the libraries are imported, here and in the workers
            if workers is not None:
                workers.stop(0.0)
            name = stop.requested or "Ctrl-C"
            raise StoppedEarly(f"stopped by {name} before the run began") from None
    return 0


@_command(
    "serve the layers of this machine's worker entries",
    """
    hetero worker --config hetero_config.json
    hetero worker --config hetero_config.json --worker-id 2
    hetero worker --keep
    """,
    *_CONFIG,
    _WORKER_ID,
    *_ACCESS,
    _flag("--keep", "wait for the next run after each"),
    _IMPORT,
    _option("--base-dir", help=argparse.SUPPRESS),
    _flag("--supervised", argparse.SUPPRESS),
    _option("--run-id", help=argparse.SUPPRESS),
)
def _run_worker(arguments: argparse.Namespace) -> int | None:
    config = _load(arguments)
    from hetero_framework.cluster.roles import decide_role

    keys = _processes(config, arguments)
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


def _access(config: Any, process: int | str, arguments: argparse.Namespace) -> Any:
    from hetero_framework.security.access import access_of

    return access_of(config, process, _key_options(arguments))


def _processes(config: Any, arguments: argparse.Namespace) -> list[str]:
    """Whose keys are here."""
    from hetero_framework.security.access import key_directory

    return list(key_directory(config, _key_options(arguments)).processes())


def _key_options(arguments: argparse.Namespace) -> Any:
    from hetero_framework.security.access import KeyOptions

    directory = Path(arguments.keys) if arguments.keys is not None else None
    return KeyOptions(directory, arguments.insecure_plaintext)


def _serve(
    config: Any,
    worker_ids: Sequence[int | str],
    arguments: argparse.Namespace,
    *,
    keep: bool = False,
    supervised: bool = False,
    run_id: str | None = None,
) -> int:
    access = _access(config, worker_ids[0], arguments)
    if not supervised:
        from hetero_framework.cluster.local_workers import PROGRAM
        from hetero_framework.cluster.supervisor import run_workers

        for worker_id in worker_ids[1:]:
            _access(config, worker_id, arguments)
        program = (*PROGRAM, *access.arguments(worker_ids))
        return run_workers(config, worker_ids, keep=keep, debug=arguments.debug, program=program)
    from hetero_framework.cluster.local_workers import watch_parent
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
    *_CONFIG,
    _option("--output-dir", metavar="DIR", default="runs/chaos", help="default: runs/chaos"),
    _option("--steps", type=int, default=20, help="of each of the two runs (default: 20)"),
    _option("--kills", type=int, default=4, help="processes to kill (default: 4)"),
    _option("--seed", type=int, default=0, help="says who is killed after which step"),
    _JSON,
)
def _run_chaos(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.output_dir)
    arguments.output_dir = None  # of the two runs, not of the configuration
    config = _load(arguments)
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
    _report(arguments, asdict(verdict), text)
    return 0 if verdict.same else HeteroError.exit_code


_PAUSE_OPTIONS = (
    _option("worker_id", metavar="ID", help="the worker, as the configuration names it"),
    _option(
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
    "print the line that makes another machine a worker, and wait until it has joined",
    """
    hetero invite 1
    hetero invite 1 2 --config cluster.json
    """,
    _option("workers", metavar="ID", nargs="+", help="a worker of the configuration"),
    *_CONFIG,
    _KEYS,
    _option("--port", type=_at_least(1), metavar="N", help="instead of the coordinator's"),
)
def _run_invite(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
    from hetero_framework.commands.keys import invite

    invite(config, Path(arguments.config), _keys(arguments), arguments.workers, arguments.port)


@_command(
    "make this machine a worker, with the line that `hetero invite` has printed",
    "hetero join 192.168.1.10:9998 HT1-...",
    _option("address", metavar="HOST:PORT", help="where `hetero invite` waits"),
    _option("token", metavar="TOKEN", help="HT1-..."),
    _option("--config", default=DEFAULT_CONFIG, metavar="FILE", help="where it is written"),
    _KEYS,
)
def _run_join(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.keys import join_cluster

    file = Path(arguments.config)
    joined = join_cluster(arguments.address, arguments.token, file, _keys(arguments))
    more = "" if arguments.config == DEFAULT_CONFIG else f" --config {file}"
    more += f" --keys {arguments.keys}" if arguments.keys else ""
    print(f"this machine is {joined.identity}; {file} is here. Next: hetero train{more}")


@_command(
    "list, check, revoke or rotate the keys of this machine; export keys of workers as files",
    """
    hetero keys list
    hetero keys check
    hetero keys revoke 2
    hetero keys rotate
    hetero keys export 1 2 --output for-the-boxes
    """,
    _option("action", choices=("list", "check", "revoke", "rotate", "export")),
    _option("workers", metavar="ID", nargs="*", help="for revoke, also coordinator; for export"),
    *_CONFIG,
    _KEYS,
    _option("--output", metavar="DIR", help="for export: where worker-ID.pem are written"),
)
def _run_keys(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands import keys as command

    action, keys, workers = arguments.action, _keys(arguments), arguments.workers
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
        print(command.check(_load(arguments), keys))
    else:
        for file in command.export(_load(arguments), keys, workers, Path(arguments.output)):
            print(f"wrote {file}; it belongs into hetero_keys on its machine (chmod 600)")


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
    *_CONFIG,
    _option(
        "--format",
        choices=("png", "svg", "pdf", "mmd"),
        help="default: by --output, else training.visualization_format; all but mmd, which is"
        " Mermaid text, need Graphviz",
    ),
    _option(
        "--output",
        metavar="PATH",
        help='file to write, "-" for Mermaid text on the screen (default: architecture.FORMAT)',
    ),
)
def _run_diagram(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
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


@_command(
    "measure the machines and say which one should hold which layers",
    """
    hetero plan --measure --config cluster.json
    hetero plan --measure --config cluster.json --save-profile fleet.json --write
    hetero plan --profile fleet.json --pin 1=4:12 --exclude 2 --margin local=2GiB --json
    hetero plan --profile fleet.json --evaluate plan.json
    """,
    *_CONFIG,
    _flag("--measure", "measure the machines of the configuration and their links"),
    _option("--profile", metavar="FILE", help="take what was measured before, or written by hand"),
    _option("--save-profile", metavar="FILE", help="keep what is measured"),
    _flag("--write", "put the plan into the configuration"),
    _option("--evaluate", metavar="FILE", help="say what this plan would take instead"),
    _files("--pin", "ID=START:END", "layers that a process must hold; may be repeated"),
    _files("--exclude", "ID", "a worker that must hold none; may be repeated"),
    _files("--margin", "ID=SIZE", "memory that stays free on a process; may be repeated"),
    _files(
        "--allow",
        "LIST",
        "what may be chosen besides checkpointing and chunks: codec, micro-batch; they change the"
        " numbers of the result a little",
    ),
    _option("--role", choices=("coordinator",), help=_ROLE),
    *_ACCESS,
    _JSON,
)
def _run_plan(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.plan import Wishes, judge_plan, make_plan, text, write_plan
    from hetero_framework.planner import load_profile

    if arguments.measure == (arguments.profile is not None):
        raise UserError("hetero plan needs one of --measure and --profile FILE")
    if arguments.save_profile is not None and not arguments.measure:
        raise UserError("--save-profile keeps what --measure finds")
    wishes = Wishes(arguments.pin, arguments.exclude, arguments.margin, arguments.allow)
    if arguments.evaluate is not None and (wishes.pins or wishes.excluded or wishes.allow):
        raise UserError("--evaluate takes the plan as it is, without --pin, --exclude, --allow")
    if arguments.evaluate is not None and arguments.write:
        raise UserError("--write puts a new plan into the configuration, without --evaluate")
    profile = _measured(arguments) if arguments.measure else load_profile(arguments.profile)
    if arguments.evaluate is not None:
        found = judge_plan(profile, Path(arguments.evaluate), wishes)
    else:
        found = make_plan(profile, wishes)
    _report(arguments, found, text)
    if arguments.write:
        write_plan(found, Path(arguments.config))
        _log.info("wrote the plan into %s", arguments.config)


def _measured(arguments: argparse.Namespace) -> Any:
    """The profile of the configuration's machines."""
    config = _load(arguments)
    _check_coordinator(config, arguments)
    from hetero_framework.commands.fleet import measure_fleet
    from hetero_framework.core.files import write_file

    profile = measure_fleet(config, access=_access(config, "local", arguments))
    if arguments.save_profile is not None:
        content = json.dumps(profile.to_dict(), indent=1).encode() + b"\n"
        try:
            write_file(Path(arguments.save_profile), content)
        except OSError as error:
            text = f"cannot write {arguments.save_profile}: {error.strerror or error}"
            raise UserError(text) from error
    return profile


def _check_coordinator(config: Any, arguments: argparse.Namespace) -> None:
    """Raise UserError on a machine that has workers alone."""
    from hetero_framework.cluster.roles import decide_role

    role = decide_role(config, role=arguments.role, keys=_processes(config, arguments))
    if not role.is_coordinator:
        names = " and ".join(f"worker {worker}" for worker in role.worker_ids)
        raise UserError(
            f"this machine is {names}; hetero {arguments.command} runs on the coordinator's",
            hint="here, run hetero worker",
        )


@_command(
    "measure this configuration's machines: links, seconds per layer, and the step they make",
    """
    hetero bench --config hetero_config.json
    hetero bench --config hetero_config.json --steps 8 --mb 32 --json
    """,
    *_CONFIG,
    _option(
        "--steps",
        type=_at_least(2),
        default=4,
        metavar="N",
        help="training steps to compute and forget; the first does not count (default 4)",
    ),
    _option(
        "--mb",
        type=_at_least(1),
        default=8,
        metavar="N",
        help="size of the messages that measure the links, in 10^6 bytes (default 8)",
    ),
    _option("--role", choices=("coordinator",), help=_ROLE),
    *_ACCESS,
    _JSON,
)
def _run_bench(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
    _check_coordinator(config, arguments)
    from hetero_framework.commands.bench import bench, text

    access, nbytes = _access(config, "local", arguments), arguments.mb * 10**6
    found = bench(config, steps=arguments.steps, nbytes=nbytes, access=access)
    _report(arguments, found, text)


@_command(
    "where the time of a run's steps went, and what would help most; draws a step",
    """
    hetero timeline runs/default
    hetero timeline runs/default --json
    hetero timeline runs/default --step 3 --output step3.svg
    """,
    _option("place", metavar="RUN", help="output_dir of a run, or its timeline.json"),
    _option("--step", type=int, metavar="N", help="draw this step (default: the last)"),
    _option("--format", choices=("png", "svg", "pdf"), help="default: by --output"),
    _option(
        "--output",
        metavar="PATH",
        help="picture to write (default: timeline.png beside timeline.json)",
    ),
    _flag("--json", "print JSON; draw only with --output"),
)
def _run_timeline(arguments: argparse.Namespace) -> None:
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
    _report(arguments, found.to_dict(), lambda _: text(found))
    if arguments.output is None and arguments.json:
        return
    if arguments.output is None and not can_draw():
        print('\nno picture: it needs matplotlib (pip install "hetero-framework[pictures]")')
        return
    place = Path(arguments.place)
    folder = place if place.is_dir() else place.parent
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
    _option("--config", metavar="FILE", help=f"the configured model (default: {DEFAULT_CONFIG})"),
    _option("--model-type", metavar="NAME", help="a tiny random model of this type"),
    _flag("--all", "every causal LM architecture that is installed"),
    _option("--cuts", type=_cuts, metavar="2,5", help="cut before these layers"),
    _option(
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
    parts = filter(None, (subject, cuts, numbers, result.reason))
    print(printable("; ".join(parts)), flush=True)


@_command(
    "fold an adapter into its model and write a checkpoint",
    "hetero merge --adapter runs/llama8b/adapter --model meta-llama/Llama-3.1-8B --output merged",
    _option("--adapter", required=True, metavar="DIR", help="PEFT adapter directory"),
    _option("--model", required=True, metavar="NAME", help="model directory or hub name"),
    *_OUTPUT_DIRECTORY,
    _option("--revision", metavar="NAME", help="branch, tag or commit on the hub"),
    _option(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="type of the result (default: that of the model)",
    ),
)
def _run_merge(arguments: argparse.Namespace) -> None:
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
    _option(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step_N directory, or the output_dir of a run (its latest)",
    ),
    *_OUTPUT_DIRECTORY,
    _option(
        "--config",
        metavar="FILE",
        help="where model and tokenizer are now (default: as the run had them)",
    ),
)
def _run_export(arguments: argparse.Namespace) -> None:
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
    _option(
        "--config",
        metavar="FILE",
        help="say what is wrong with this configuration's machines, seen from here, and what to do",
    ),
    _WORKER_ID,
    *_ACCESS,
    _JSON,
)
def _run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.config is None:
        from hetero_framework.commands.doctor import examine, text

        _report(arguments, examine(), text)
        return 0
    config = _load(arguments)
    from hetero_framework.commands import diagnosis

    options = _key_options(arguments)
    found = diagnosis.diagnose(config, worker_id=arguments.worker_id, options=options)
    _report(arguments, found, diagnosis.text)
    return UserError.exit_code if found["findings"] else 0


@_command(
    "print the JSON Schema of hetero_config.json",
    "hetero schema > hetero_config.schema.json",
)
def _run_schema(arguments: argparse.Namespace) -> None:
    from hetero_framework.config import json_schema

    print(json.dumps(json_schema(), indent=2))


def _report(
    arguments: argparse.Namespace, found: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> None:
    print(json.dumps(found, indent=2) if arguments.json else printable(text(found)))


def _import_files(arguments: argparse.Namespace) -> None:
    if arguments.imports:
        from hetero_framework import control

        for file in arguments.imports:
            control.import_file(Path(file))


def _load(arguments: argparse.Namespace) -> Any:
    from hetero_framework.config import load_config

    overrides = [*getattr(arguments, "set", ())]
    if getattr(arguments, "output_dir", None):
        # A path on the command line starts at the current directory, one in the file at the file.
        path = Path(arguments.output_dir).absolute()
        overrides.append(f"training.output_dir={json.dumps(str(path))}")
    config = load_config(
        arguments.config or DEFAULT_CONFIG, overrides, getattr(arguments, "base_dir", None)
    )
    set_level(config.training.log_level)
    return config


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
