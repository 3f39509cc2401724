"""Kinds of files of examples, one module each: the registry's table "files" has them by suffix."""
