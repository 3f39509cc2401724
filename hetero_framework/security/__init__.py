"""Keys, certificates and pairing: who may take part in a cluster."""
