"""Launching: the files and commands that start every process of a configuration."""
