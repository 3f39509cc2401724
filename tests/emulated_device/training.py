"""Trains a tiny Llama for three steps and prints the losses and the sum of each weight's bits.

python -m tests.emulated_device.training float32|bfloat16 eager|sdpa DEVICE
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 3


def train(device: str, lower: bool) -> dict[str, list[float] | str]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        ids = (torch.arange(40).view(2, 20) * (step + 3) % 64).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=lower):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = hashlib.sha256()
    for tensor in model.state_dict().values():
        weights.update(tensor.detach().cpu().numpy().tobytes())
    return {"losses": losses, "weights": weights.hexdigest()}


if __name__ == "__main__":
    print(json.dumps([train(sys.argv[1], lower) for lower in (False, True)]))
