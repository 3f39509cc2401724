"""Extras: one folder for each thing beyond an ordinary run. The heart imports none of them."""
