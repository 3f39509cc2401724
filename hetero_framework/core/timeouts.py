"""How long is waited for what, in seconds: all waits of links and processes that users cannot set.

Those that depend on the network or the model are in the configuration (`training.*_timeout_s`).
"""

from __future__ import annotations

TICK_S = 0.5
"""A thread in a socket call looks at its deadlines, and a waiting one hears Ctrl-C, so often."""
ANSWER_TICK_S = 0.1
"""The same for a thread that waits for an answer or for another thread, which take less."""
EXIT_TICK_S = 0.05
"""A process looks so often whether one that it has started has ended."""

HEARTBEAT_S = 2.0
"""A link that was silent for so long says that it is alive."""
LIVENESS_S = 15.0
"""A peer that was silent for so long is gone, unless the configuration says otherwise."""
SEND_S = 600.0
"""A peer that takes nothing for so long while bytes wait for it is gone."""
TURN_S = 5.0
"""A large frame goes after so long without its receiver's word."""
DRAIN_S = 5.0
"""A link that is closed has so long to write what is queued."""

HANDSHAKE_S = 60.0
"""Whoever was dialled has so long for its first answer; it may be in a long computation."""
REHANDSHAKE_S = 15.0
"""The same after a lost link: who has been there answers from a thread that does not compute."""
ALIVE_S = 10.0
"""A process that does nothing in a step has so long to answer a question; else it hangs."""
STRANGER_S = 10.0
"""Whoever connects has so long to say who it is."""
LAST_WORD_S = 1.0
"""How long a refused peer has to read why before its connection is closed."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection that could not be accepted."""
QUIET_S = 3.0
"""The user hears of a worker that has not answered for so long."""
PAUSED_S = 60.0
"""That a worker is paused is said again after so long, and then ever less often."""
CALL_PAUSE_S = 2.0
"""A worker that dials and was not served waits so long before it calls again."""
BUSY_PAUSE_S = 1.0
"""Pause before a worker that serves another run is asked again."""
DIRECT_DIAL_S = 5.0
"""A worker has so long to reach another worker."""
REDIAL_S = 60.0
"""Longest pause before a lost link between workers is opened again."""

REPLAN_S = 60.0
"""A run that may go on without a worker waits so long for it; started again, it is back by then."""
COORDINATOR_S = 1800.0
"""A worker without --keep waits so long for its coordinator to be started again."""
STEP_END_S = 12.0
"""A step that is under way when the run is told to stop has so long to end; then it is given up."""
STOP_PATIENCE_S = 6.0
"""A run that was told to stop waits so long for a worker from which nothing comes."""
HAND_OVER_S = 18.0
"""A worker that was told to end still serves its coordinator for so long."""
RELEASE_S = 22.0
"""A worker that was told to end has ended by then, in the middle of a computation if need be."""
DEATHS_S = 600.0
"""A process may die only so often within such a time; then it is not started again."""
EXIT_S = 10.0
"""A process has so long to end in order before it is killed."""
STOP_S = 2.0
"""The same where a run is given up: nothing is saved any more."""

PROBE_S = 2.0
"""No further question measures a link when the ones before took so long together."""
PROBE_ANSWER_S = 120.0
"""A worker that measures its link to another one waits so long for an answer."""
LOCK_S = 2.0
"""`hetero pause` holds a lock for a moment when it looks whether anybody else does."""
KEYS_S = 20.0
"""How long a process that changes keys waits for another one that does."""
FILE_BUSY_S = 5.0
"""Windows: so long another program may hold a file open that is to be renamed."""

ISLAND_S = 3600.0
"""Another island may take so long for what all of a group wait for; one that stalls leaves by
itself, long before."""
