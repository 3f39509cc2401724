"""What was found of tiny copies is remembered from one run of this folder to the next."""

from contextlib import ExitStack

import pytest

from tests.fault_proxy import FaultProxy


@pytest.fixture(autouse=True)
def _remembered(verdicts):
    pass


@pytest.fixture
def proxies(pool):
    """A proxy before each of workers 1 and 2."""
    with ExitStack() as stack:
        yield {
            w["id"]: stack.enter_context(FaultProxy((w["ip"], w["port"])))
            for w in pool.machines["workers"][:2]
        }
