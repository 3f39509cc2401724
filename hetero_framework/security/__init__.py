"""Keys, certificates and pairing."""
