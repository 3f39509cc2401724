"""The planner: layers, stages and schedule for a fleet, from times alone. No torch, no sockets.

`plan` and `evaluate` are its interface. docs/maintainers/planner.md describes the search, part by
part.
"""

from hetero_framework.extras.planner.planning import evaluate, plan
from hetero_framework.extras.planner.profile import FleetProfile, load_profile
from hetero_framework.extras.planner.result import Result

__all__ = ["FleetProfile", "Result", "evaluate", "load_profile", "plan"]
