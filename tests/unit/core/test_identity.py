from __future__ import annotations

import pytest

from hetero_framework.core.identity import ISLANDS, STAR, Identity

CLUSTER = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("process", "uri", "text"),
    [
        ("local", f"hetero://{CLUSTER}/coordinator", "the coordinator"),
        (3, f"hetero://{CLUSTER}/worker/3", "worker 3"),
        ("coordinator", f"hetero://{CLUSTER}/worker/coordinator", "worker coordinator"),
        ("a.b_c-d", f"hetero://{CLUSTER}/worker/a.b_c-d", "worker a.b_c-d"),
    ],
)
def test_identity_is_its_uri_and_back(process, uri, text):
    identity = Identity.of(CLUSTER, process)
    assert (identity.uri, str(identity)) == (uri, text)
    assert Identity.parse(uri) == identity


@pytest.mark.parametrize(
    ("process", "uri", "text"),
    [
        ("local", f"hetero://{CLUSTER}/lighthouse", "the lighthouse"),
        ("garage", f"hetero://{CLUSTER}/island/garage", "island garage"),
        ("coordinator", f"hetero://{CLUSTER}/island/coordinator", "island coordinator"),
    ],
)
def test_an_island_is_no_worker(process, uri, text):
    identity = Identity.of(CLUSTER, process, ISLANDS)
    assert (identity.uri, str(identity)) == (uri, text)
    assert Identity.parse(uri) == identity
    assert identity != Identity.of(CLUSTER, process)
    assert identity.worker is None
    assert identity.island == (None if process == "local" else process)
    assert identity.keeps == (process == "local")


def test_a_worker_is_no_island_and_keeps_nothing():
    worker = Identity.of(CLUSTER, 3)
    assert (worker.worker, worker.island, worker.keeps) == ("3", None, False)
    coordinator = Identity.of(CLUSTER, "local")
    assert (coordinator.worker, coordinator.island, coordinator.keeps) == (None, None, True)


@pytest.mark.parametrize(
    ("kind", "invite"),
    [
        (STAR, "hetero invite ID on the coordinator's machine"),
        (ISLANDS, "hetero invite --island NAME on the lighthouse's machine"),
    ],
)
def test_each_kind_of_identity_has_its_invite_command(kind, invite):
    assert kind.invite == invite


@pytest.mark.parametrize(
    "uri",
    [
        "",
        f"http://{CLUSTER}/coordinator",
        f"hetero://{CLUSTER}/coordinator/",
        f"hetero://{CLUSTER}/coordinator\n",
        f"hetero://{CLUSTER}/worker/",
        f"hetero://{CLUSTER}/worker/local",
        f"hetero://{CLUSTER}/island/local",
        f"hetero://{CLUSTER}/lighthouse/garage",
        f"hetero://{CLUSTER}/worker/../coordinator",
        f"hetero://{CLUSTER}/worker/{'a' * 65}",
        f"hetero://{CLUSTER[:-1]}/worker/1",
        f"HETERO://{CLUSTER}/worker/1",
    ],
)
def test_other_names_are_refused_as_an_identity(uri):
    with pytest.raises(ValueError, match="names no process"):
        Identity.parse(uri)
