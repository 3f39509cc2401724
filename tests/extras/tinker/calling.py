"""Calls as a client sends them, and a model that takes them in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetero_framework.config import Config
from hetero_framework.extras.tinker.called_model import CalledModel, cluster_for, prepared
from hetero_framework.security.access import access_of

ADAM = {
    **{"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12},
    **{"weight_decay": 0.1, "grad_clip_norm": 0.5},
}


def request(
    examples: Sequence[dict[str, Any]], loss: str, model: str = "", seq: int = 0, **more: Any
) -> Any:
    """A ForwardBackwardRequest. `tokens` are the input of an example, all else its tensors."""
    from tinker.proto import tinker_public_pb2 as pb

    asked = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, **more)
    for example in examples:
        datum = asked.data.add()
        chunk = datum.model_input.add()
        chunk.encoded_text.tokens = np.array(example["tokens"], np.int32).tobytes()
        for name in example.keys() - {"tokens"}:
            is_ids = name == "target_tokens"
            values = np.array(example[name], np.int64 if is_ids else np.float32)
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), 2 if is_ids else 1
            tensor.shape.extend(values.shape)
    return asked


def drawn(seed: int, count: int, *names: str) -> list[dict[str, Any]]:
    """Examples of uneven length with random tensors."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(draw.integers(4, 12))
        example: dict[str, Any] = {
            "tokens": draw.integers(3, 320, length),
            "target_tokens": draw.integers(3, 320, length),
        }
        for name in names:
            example[name] = draw.normal(-5.8 if name == "logprobs" else 0.5, 0.3, length)
        found.append(example)
    return found


@contextmanager
def called(raw: dict[str, Any]) -> Iterator[CalledModel]:
    """A model that calls train, with the processes of its plan."""
    config, source = prepared(Config.from_dict(raw))
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    access = access_of(config, "local")
    with cluster_for(config, source, access, "0123456789abcdef") as cluster:
        yield CalledModel(config, cluster, source)
