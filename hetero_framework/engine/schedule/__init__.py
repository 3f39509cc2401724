"""The schedule of a step: simulation, tuning, order. The only part that the engine needs."""
