"""Learn sums by trying them: GRPO by the calls of the tinker client.

    python examples/tinker/grpo.py MODEL

sums.py says how to make a model and an endpoint. Each step asks some sums and takes a group of 8
answers to each. The advantage of an answer is its reward less the mean of its group. Of the small
model's answers about 6 % are right at first and most after 120 steps, a few minutes on a CPU.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import tinker
from sums import example, options, sums
from tinker import types

GROUP = 8
QUESTIONS = 8  # of a step


def reward(text: str, right: str) -> float:
    """1 for an answer that begins with the right number."""
    return float(text.split()[:1] == [right])


def main(service: tinker.ServiceClient) -> None:
    args = options(tokens=1)
    client = service.create_lora_training_client(args.model, rank=32, seed=args.seed).result()
    tokenizer, draw = client.get_tokenizer(), random.Random(args.seed)
    for step in range(args.steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=args.tokens, seed=step)
        asked = draw.sample(sums(), QUESTIONS)
        prompts = [tokenizer.encode(question) for question, _ in asked]
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts
        ]
        data, rewards, texts = [], [], []
        for prompt, (_, right), future in zip(prompts, asked, futures, strict=True):
            answers = future.result().sequences
            found = [tokenizer.decode(answer.tokens) for answer in answers]
            earned = np.array([reward(text, right) for text in found])
            for answer, advantage in zip(answers, earned - earned.mean(), strict=True):
                if (
                    advantage != 0
                ):  # a group whose answers are all right or all wrong teaches nothing
                    same = [advantage] * len(answer.tokens)
                    given = {"logprobs": answer.logprobs, "advantages": same}
                    data.append(example(prompt, answer.tokens, **given))
            rewards += earned.tolist()
            texts += found
        if data:
            passed = client.forward_backward(data, "importance_sampling")
            stepped = client.optim_step(types.AdamParams(learning_rate=args.rate))
            passed.result()
            stepped.result()
        print(f"step {step + 1}: {np.mean(rewards):.0%} of {len(rewards)} are right", flush=True)
        if args.log:
            line = {"step": step + 1, "rewards": rewards, "texts": texts}
            with Path(args.log).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(client.save_weights_for_sampler("grpo").result().path)


if __name__ == "__main__":
    with tinker.ServiceClient() as client:
        main(client)
