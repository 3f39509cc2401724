"""Branch and bound: searches all layouts of a small fleet for a better one."""
