"""Shared by all tests: no model hub, no threads or processes left behind."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread per process: parity to the last bit is promised for equal thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is remembered between tests; those of what is remembered choose a directory.
os.environ.setdefault("HETERO_CACHE", "")
