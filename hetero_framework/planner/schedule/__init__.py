"""How a step is run: simulated, tuned, ordered. The engine needs nothing else of the planner."""
