"""How long is waited for what, in seconds: all waits of links and processes that users cannot set.

Those that depend on the network or the model are in the configuration (`training.*_timeout_s`).
"""

from __future__ import annotations

TICK_S = 0.5
"""A thread in a socket call looks at its deadlines, and a waiting one hears Ctrl-C, so often."""
HEARTBEAT_S = 2.0
"""A link that was silent for so long says that it is alive."""
LIVENESS_S = 30.0
"""A peer that was silent for so long is gone, unless the configuration says otherwise."""
HANDSHAKE_S = 60.0
"""Whoever was dialled has so long for its first answer; it may be in a long computation."""
STRANGER_S = 10.0
"""Whoever connects has so long to say who it is."""
SEND_S = 600.0
"""A peer that takes nothing for so long while bytes wait for it is gone."""
DRAIN_S = 5.0
"""A link that is closed has so long to write what is queued."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection that could not be accepted."""
