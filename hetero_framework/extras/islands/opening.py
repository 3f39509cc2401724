"""Makes the ReplicaGroup of a run that is one of several islands.

Of the modules here, only `summed_steps.py` and `outer_rounds.py` know the run. The others know
members, links and arithmetic.
"""

from __future__ import annotations

import secrets

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.extras.islands.group import Group
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from hetero_framework.extras.islands.links import IslandLinks
from hetero_framework.extras.islands.outer_rounds import OuterRounds
from hetero_framework.extras.islands.settings import island_of
from hetero_framework.extras.islands.summed_steps import SummedSteps
from hetero_framework.security.access import Access
from hetero_framework.trainer.run_checkpoint import RunCheckpoints
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.signals import StopRequest


def open_islands(
    prepared: Prepared,
    cluster: Cluster,
    checkpoints: RunCheckpoints,
    stop: StopRequest,
    access: Access,
) -> SummedSteps:
    """The group that the island section of this run's configuration asks for."""
    config = prepared.config
    island = island_of(config)
    links = IslandLinks(
        island.name,
        secrets.token_hex(8),
        access,
        config.coordinator.ip,
        max_frame_bytes=prepared.max_frame_bytes,
        liveness_s=config.training.liveness_timeout_s,
    )
    kind = SummedSteps if island.sync_steps == 1 else OuterRounds
    group = kind(prepared, cluster, checkpoints, stop)
    lighthouse = LighthouseClient(island.lighthouse_address, access, links.member, group.lively)
    place = Group(lighthouse, links, island.min_islands, group.heed_stop, island.wait_s)
    group.open(place)
    return group
