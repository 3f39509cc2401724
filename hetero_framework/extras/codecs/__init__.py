"""Codecs: tensors cross a slow network in fewer bytes, rounded."""
