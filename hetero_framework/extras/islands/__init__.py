"""Islands: coordinators, each with workers of its own, that train one model together."""
