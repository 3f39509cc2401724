"""`hetero worker`: serves the layers of this machine's worker entries."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    IMPORT,
    LIFE_LINE,
    WORKER_ID,
    access_for,
    flag,
    key_options,
    load,
    option,
    role_of,
)

EXAMPLES = """
    hetero worker --config hetero_config.json
    hetero worker --config hetero_config.json --worker-id 2
    hetero worker --keep
    """
OPTIONS = (
    *CONFIG,
    WORKER_ID,
    *ACCESS,
    flag("--keep", "wait for the next run after each"),
    IMPORT,
    LIFE_LINE,
    option("--base-dir", help=argparse.SUPPRESS),
    flag("--supervised", argparse.SUPPRESS),
    option("--run-id", help=argparse.SUPPRESS),
)


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments, saved_plan=False)
    role = role_of(config, key_options(arguments), "worker", arguments.worker_id)
    return serve(
        config,
        role.worker_ids,
        arguments,
        keep=arguments.keep,
        supervised=arguments.supervised,
        run_id=arguments.run_id,
    )


def serve(
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
        from hetero_framework.cluster.local_workers import run_workers

        for worker_id in worker_ids[1:]:
            access_for(config, worker_id, arguments)
        program = (*PROGRAM, *access.arguments(worker_ids))
        return run_workers(config, worker_ids, keep=keep, debug=arguments.debug, program=program)
    from hetero_framework.cluster.child import watch_parent
    from hetero_framework.cluster.roles import threads_for
    from hetero_framework.cluster.stop_signals import StopSignals

    # Set before torch is imported, which reads it only then.
    os.environ["OMP_NUM_THREADS"] = str(threads_for(config, worker_ids[0]))
    from hetero_framework.cluster.worker import serve
    from hetero_framework.engine.loading import load_stages

    # Called after the imports, which on Windows wait for a thread that reads standard input.
    orders = StopSignals(ends=True)
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
