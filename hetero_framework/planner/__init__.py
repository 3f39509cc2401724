"""Which task runs when, decided from times alone: no torch, no sockets."""
