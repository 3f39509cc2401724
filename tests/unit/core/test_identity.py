from __future__ import annotations

import pytest

from hetero_framework.core.identity import Identity

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
def test_identity_is_its_uri_and_back(process: int | str, uri: str, text: str) -> None:
    identity = Identity.of(CLUSTER, process)
    assert (identity.uri, str(identity)) == (uri, text)
    assert Identity.parse(uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        f"http://{CLUSTER}/coordinator",
        f"hetero://{CLUSTER}/coordinator/",
        f"hetero://{CLUSTER}/coordinator\n",
        f"hetero://{CLUSTER}/worker/",
        f"hetero://{CLUSTER}/worker/../coordinator",
        f"hetero://{CLUSTER}/worker/{'a' * 65}",
        f"hetero://{CLUSTER[:-1]}/worker/1",
        f"HETERO://{CLUSTER}/worker/1",
    ],
)
def test_other_names_are_no_identity(uri: str) -> None:
    with pytest.raises(ValueError, match="names no process"):
        Identity.parse(uri)
