"""The example of islands."""

from __future__ import annotations

import json

import pytest

from hetero_framework.core import timeouts
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.extras.islands import lighthouse
from tests.extras.islands.helpers import StandIn, serving, train_islands
from tests.integration.test_examples import EXAMPLES
from tests.integration.test_parity import assert_same, weights

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]


@pytest.mark.long
def test_islands_of_the_example_train_one_model(pool, llama, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(lighthouse, "SETTLE_S", 0.0)
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", LinkDeadlines())
    example = json.loads((EXAMPLES / "island.json").read_text(encoding="utf-8"))
    raws = {}
    with serving(StandIn()) as served:
        for worker, name in enumerate(("attic", "garage"), 1):
            short = {"max_steps": 12, "gradient_accumulation_steps": 2, "warmup_steps": 2}
            own = pool.config(tmp_path / name, [3], training=short)
            plan = [own["shard_plan"][0], {**own["shard_plan"][1], "id": worker}]
            section = {"name": name, "lighthouse": f"127.0.0.1:{served.port}"}
            section |= {"warmup_steps": 2, "sync_steps": 4, "delay_steps": 1}
            raws[name] = {
                **example,
                "coordinator": own["coordinator"],
                "workers": [pool.machines["workers"][worker - 1]],
                "shard_plan": plan,
                "model": {"name_or_path": str(llama)},
                "data": {**example["data"], "train": str(texts)},
                "training": {**example["training"], **own["training"]},
                "island": {**example["island"], **section},
            }
        train_islands(raws)
    assert_same(weights(tmp_path / "attic"), weights(tmp_path / "garage"))
