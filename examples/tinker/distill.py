"""Learn from a teacher by one's own attempts: on-policy distillation with the tinker client.

    python examples/tinker/distill.py MODEL --teacher tinker://.../sampler_weights/sft

The teacher is an adapter of the same model, such as that of sft.py. What the student writes is read
by the teacher. The advantage of a token is how much likelier the teacher finds it than the student
does, so that the student's own texts become those of the teacher.
"""

from __future__ import annotations

import random

import numpy as np
import tinker
from sums import example, options, sums
from tinker import types

GROUP = 4
QUESTIONS = 8  # of a step


def main(service: tinker.ServiceClient) -> None:
    args = options(teacher="", tokens=2)
    client = service.create_lora_training_client(args.model, rank=32, seed=args.seed).result()
    teacher = service.create_sampling_client(model_path=args.teacher).result()
    tokenizer, draw = client.get_tokenizer(), random.Random(args.seed)
    for step in range(args.steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=args.tokens, seed=step)
        prompts = [tokenizer.encode(question) for question, _ in draw.sample(sums(), QUESTIONS)]
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts
        ]
        texts = [
            (prompt, answer)
            for prompt, future in zip(prompts, futures, strict=True)
            for answer in future.result().sequences
        ]
        read = [
            teacher.compute_logprobs(types.ModelInput.from_ints([*prompt, *answer.tokens]))
            for prompt, answer in texts
        ]
        data, distances = [], []
        for (prompt, answer), future in zip(texts, read, strict=True):
            likelier = np.array(future.result()[len(prompt) :]) - np.array(answer.logprobs)
            given = {"logprobs": answer.logprobs, "advantages": likelier}
            data.append(example(prompt, answer.tokens, **given))
            distances.append(-likelier.sum())
        passed = client.forward_backward(data, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=args.rate, grad_clip_norm=1.0))
        passed.result()
        stepped.result()
        print(f"step {step + 1}: distance {np.mean(distances):.3f} per answer", flush=True)
    print(client.save_weights_for_sampler("distilled").result().path)


if __name__ == "__main__":
    with tinker.ServiceClient() as client:
        main(client)
