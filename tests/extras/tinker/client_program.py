"""The client trains, samples, saves and loads; a process of its own, as its threads stay."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import tinker
from tinker import types


def main(model: str) -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    tokens = list(range(1, 21))
    inputs = {"target_tokens": tokens[1:], "weights": [0.0] * 5 + [1.0] * 14}
    whole = types.ModelInput.from_ints(tokens[:-1])
    data = [types.Datum(model_input=whole, loss_fn_inputs=inputs)] * 4

    def loss() -> float:
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    losses = []
    for _ in range(4):
        done = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    assert losses == sorted(losses, reverse=True), losses
    path, expected = client.save_state("kept").result().path, loss()
    sampler = client.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    asked = {"num_samples": 2, "sampling_params": types.SamplingParams(max_tokens=5, seed=3)}
    prompt = types.ModelInput.from_ints([5, 6, 7])
    first = sampler.sample(prompt, **asked).result()
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    assert loss() != expected
    again = sampler.sample(prompt, **asked).result()
    for one, other in zip(first.sequences, again.sequences, strict=True):
        assert list(one.tokens) == list(other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs)
    with pytest.raises(tinker.RequestFailedError, match="is no name"):
        client.save_state("../elsewhere").result()
    client = service.create_training_client_from_state_with_optimizer(path).result()
    assert loss() == expected


main(sys.argv[1])
print("all is well", flush=True)
os._exit(0)
