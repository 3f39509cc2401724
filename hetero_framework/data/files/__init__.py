"""Readers of files of examples, one module a kind; the registry's table "files" lists them."""
