"""`"shard_plan": "auto"`: makes the plan when a run begins and keeps it with the run's results."""

from __future__ import annotations

import logging

from hetero_framework.config import Config
from hetero_framework.extras.planner import FleetProfile, Result, plan_report
from hetero_framework.extras.planner.fleet import plan_fleet
from hetero_framework.extras.planner.saved_plan import save_plan
from hetero_framework.security.access import Access

_log = logging.getLogger(__name__)


def plan_run(config: Config, access: Access | None = None) -> Config:
    """The configuration with a plan for its machines, which are measured for it. The plan is
    written into `output_dir`, and workers that it leaves out are told. Raises what `measure_fleet`
    raises, PlanError where nothing fits, and ResourceError where the plan cannot be written."""
    _log.info('shard_plan is "auto": the machines are measured, and the run planned for them')
    result = plan_fleet(config, _plan, access=access)
    planned = config.with_changes(shard_plan=plan_report.entries_of(result.to_dict()))
    save_plan(planned, result)
    return planned


def _plan(fleet: FleetProfile) -> Result:
    result = plan_report.make_plan(fleet, plan_report.Wishes())
    for line in plan_report.text(plan_report.described(result)).splitlines():
        _log.info("%s", line)
    return result
