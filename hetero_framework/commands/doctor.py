"""`hetero doctor`: reports on this machine or, with --config, on what would stop a run."""

from __future__ import annotations

import argparse

from hetero_framework.commands.options import (
    ACCESS,
    JSON,
    SET,
    WORKER_ID,
    key_options,
    load,
    report,
    value,
)
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero doctor
    hetero doctor --config hetero_config.json
    hetero doctor --config hetero_config.json --worker-id 2 --json
    """
OPTIONS = (
    value("--config", "FILE", "check the machines of this configuration, as seen from this one"),
    SET,
    WORKER_ID,
    *ACCESS,
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.config is None:
        from hetero_framework.commands.machine_report import examine, text

        report(arguments, examine(), text)
        return 0
    config = load(arguments)
    from hetero_framework.commands import diagnosis

    options = key_options(arguments)
    result = diagnosis.diagnose(config, worker_id=arguments.worker_id, options=options)
    report(arguments, result, diagnosis.text)
    return UserError.exit_code if result["findings"] else 0
