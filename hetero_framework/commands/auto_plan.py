"""`"shard_plan": "auto"`: the plan of a run is made when it begins, and kept with its results."""

from __future__ import annotations

import json
import logging

from hetero_framework.commands.fleet import measure_fleet
from hetero_framework.commands.plan import Wishes, entries_of, make_plan, text
from hetero_framework.config import PLAN_FILE, Config
from hetero_framework.core.files import write_file
from hetero_framework.errors import ResourceError
from hetero_framework.security.access import Access

_log = logging.getLogger(__name__)


def plan_run(config: Config, access: Access | None = None) -> Config:
    """The configuration with a plan for its machines, which are measured for it. The plan is
    written into `output_dir`. Raises what `measure_fleet` raises, PlanError where nothing fits, and
    ResourceError where the plan cannot be written."""
    _log.info('shard_plan is "auto": the machines are measured, and the run planned for them')
    found = make_plan(measure_fleet(config, access=access), Wishes()).to_dict()
    for line in text(found).splitlines():
        _log.info("%s", line)
    planned = config.with_changes(shard_plan=entries_of(found))
    file = config.output_dir / PLAN_FILE
    kept = {**found, "shard_plan": planned.to_dict()["shard_plan"]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(kept, indent=2).encode() + b"\n")
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror or error}") from error
    return planned
