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
    from hetero_framework.extras.planner import plan_report
    from hetero_framework.extras.planner.fleet import measure_fleet

    access = access_for(config, "local", arguments)
    profile = measure_fleet(config, access=access, anew=arguments.anew)
    file, wishes = Path(arguments.config), plan_report.Wishes()
    result = plan_report.judge_plan(profile, file, wishes, config.to_dict())
    links = plan_report.links_of(profile)
    shown = {**plan_report.described(result), "measured_links": links}
    report(arguments, shown, plan_report.text)
