"""Conversion of configurations of axolotl, LLaMA-Factory and TRL."""
