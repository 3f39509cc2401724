"""The demonstration: the whole job on one machine, with a model and data that it makes."""
