"""`hetero bench`: `hetero plan --measure --evaluate` for the plan of the configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import (
    ACCESS,
    ANEW,
    CONFIG,
    IMPORT,
    JSON,
    ROLE_HELP,
    access_for,
    check_coordinator,
    load,
    option,
    report,
)

EXAMPLES = """
    hetero bench --config hetero_config.json
    hetero bench --config hetero_config.json --anew --json
    """
OPTIONS = (
    *(*CONFIG, IMPORT, ANEW),
    *(option("--role", choices=("coordinator",), help=ROLE_HELP), *ACCESS, JSON),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.preflight import preflight

    config = load(arguments)
    check_coordinator(config, arguments)
    config.require("model")
    preflight(config, data=False)
    _ = config.plan  # PlanError where there is none, before anything is measured
    from hetero_framework.extras.planner.fleet import measure_fleet
    from hetero_framework.extras.planner.plan_report import (
        Wishes,
        described,
        judge_settings,
        links_of,
        text,
    )

    access = access_for(config, "local", arguments)
    profile = measure_fleet(config, access=access, anew=arguments.anew)
    result = judge_settings(profile, config.to_dict(), Path(arguments.config), Wishes())
    report(arguments, {**described(result), "measured_links": links_of(profile)}, text)
