"""Teach right answers: supervised training by the calls of the tinker client.

    python examples/tinker/sft.py MODEL

sums.py says how to make a model and an endpoint. The last line is where the adapter is; distill.py
takes it as its teacher.
"""

from __future__ import annotations

import random

import tinker
from sums import example, options, sums
from tinker import types

BATCH = 16


def main(service: tinker.ServiceClient) -> None:
    args = options()
    client = service.create_lora_training_client(args.model, rank=32, seed=args.seed).result()
    tokenizer, draw = client.get_tokenizer(), random.Random(args.seed)
    for step in range(args.steps):
        data = []
        for question, right in draw.sample(sums(), BATCH):
            answer = tokenizer.encode(f" {right}", add_special_tokens=False)
            answer.append(tokenizer.eos_token_id)
            data.append(example(tokenizer.encode(question), answer, weights=[1] * len(answer)))
        # Both are sent before either is waited for, so the server always has something to do.
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=args.rate, grad_clip_norm=1.0))
        loss = passed.result().metrics["loss:sum"] / BATCH
        stepped.result()
        print(f"step {step + 1}: loss {loss:.3f} per answer", flush=True)
    print(client.save_weights_for_sampler("sft").result().path)


if __name__ == "__main__":
    with tinker.ServiceClient() as client:
        main(client)
