"""Deadlines and intervals of links and processes that users cannot set, in seconds.

Those that depend on the network or the model are in the configuration (`training.*_timeout_s`).
"""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.5
"""Interval at which a thread checks its deadlines in a socket call, or Ctrl-C while it waits."""
ANSWER_TICK_S = 0.1
"""Interval of the same checks where a thread waits for an answer or for another thread."""
EXIT_TICK_S = 0.05
"""Interval at which a process checks whether a child has ended."""

HEARTBEAT_S = 2.0
"""Idle time before a heartbeat is sent."""
LIVENESS_S = 15.0
"""Silence after which a peer counts as gone, unless the configuration sets it."""
SEND_S = 600.0
"""A peer that reads nothing for this long while bytes wait for it counts as gone."""
TURN_S = 5.0
"""Longest wait of a large frame for its receiver's permission; then it is sent without."""
DRAIN_S = 5.0
"""Deadline for a closing link to write its queue."""

HANDSHAKE_S = 60.0
"""Handshake deadline for outbound connections; the peer may be in a long computation."""
REHANDSHAKE_S = 15.0
"""Handshake deadline after a lost link: a thread that does not compute answers a known peer."""
ALIVE_S = 10.0
"""A process that makes no progress in a step and does not answer for this long counts as hung."""
STRANGER_S = 10.0
"""Handshake deadline for inbound connections."""
LAST_WORD_S = 1.0
"""How long a refused peer has to read why before its connection is closed."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection that could not be accepted."""
QUIET_S = 3.0
"""Time without an answer of a worker before the user is told."""
CALL_PAUSE_S = 2.0
"""Pause before a worker that dials, and was not served, calls again."""
BUSY_PAUSE_S = 1.0
"""Pause before a worker that serves another run is asked again."""
DIRECT_DIAL_S = 5.0
"""Deadline for a worker to reach another worker."""
REDIAL_S = 60.0
"""Longest pause before a lost link between workers is opened again."""

REPLAN_S = 60.0
"""How long a run that may go on without a worker waits for it; a restart takes less."""
COORDINATOR_S = 1800.0
"""How long a worker without --keep waits for its coordinator to be started again."""
STEP_END_S = 12.0
"""Deadline for the current step when the run is told to stop; then the step is given up."""
STOP_PATIENCE_S = 6.0
"""How long a run that was told to stop waits for a silent worker."""
HAND_OVER_S = 18.0
"""How long a worker that was told to end still serves its coordinator."""
RELEASE_S = 22.0
"""Deadline for a worker that was told to end, in the middle of a computation if need be."""
DEATHS_S = 600.0
"""Window over which the deaths of a process are counted; after too many it stays ended."""
EXIT_S = 10.0
"""Deadline for a process to end in order before it is killed."""
STOP_S = 2.0
"""Deadline like EXIT_S where a run is given up and nothing is saved any more."""

PROBE_S = 2.0
"""A link is measured for at most about this long: then no further question is sent."""
PROBE_ANSWER_S = 120.0
"""Deadline for an answer to a worker that measures its link to another one."""
KEYS_S = 20.0
"""How long a process that changes keys waits for another process that does."""
FILE_BUSY_S = 5.0
"""Windows: how long another program may hold a file open that is to be renamed."""

TELL_LOADING_S = 60.0
"""How often a run names the workers that still load."""

UPLOAD_S = 300.0
"""Deadline for an upload to the hub, plus the time of its bytes at UPLOAD_BYTES_PER_S."""
UPLOAD_BYTES_PER_S = 250e3
"""Slowest upload that a run waits for."""

ISLAND_S = 3600.0
"""Deadline for another island where all islands of a group wait for each other. An island that
stalls leaves by itself long before."""


@dataclass(frozen=True)
class LinkDeadlines:
    """The deadlines of one link that the configuration or the peer's role sets."""

    heartbeat_s: float = HEARTBEAT_S
    liveness_s: float = LIVENESS_S
    handshake_s: float = HANDSHAKE_S
    send_s: float = SEND_S


LIGHTHOUSE_LINK = LinkDeadlines(heartbeat_s=0.4, liveness_s=2.75, handshake_s=STRANGER_S)
"""Deadlines of a link between an island and a lighthouse; it ends after 2 seconds of silence."""
