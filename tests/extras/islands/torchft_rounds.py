"""One island by torchft's own LocalSGD and DiLoCo, in one process that has the whole model: what
`OuterRounds` is compared to.

    python -m tests.extras.islands.torchft_rounds NAME FOLDER ...

One run after the other: FOLDER/case.json says what to do, FOLDER/NAME.safetensors has the
micro-batches of each step, and FOLDER/NAME.agreed.safetensors gets what is agreed on after each
synchronisation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
from transformers import AutoModelForCausalLM

Step = list[dict[str, Tensor]]
PATIENCE = timedelta(seconds=120)


def _load_steps(path: Path) -> Iterator[Step]:
    steps: dict[int, dict[int, dict[str, Tensor]]] = {}
    for key, tensor in load_file(path).items():
        k, m, name = key.split("/")
        steps.setdefault(int(k), {}).setdefault(int(m), {})[name] = tensor
    for k in sorted(steps):
        yield [steps[k][m] for m in sorted(steps[k])]


def _fragment(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A module that has these parameters of `model`."""
    made = nn.Module()
    for name in names:
        made.register_parameter(name.replace(".", "/"), model.get_parameter(name))
    return made


def _averaging(
    case: Mapping[str, Any], manager: Manager, model: nn.Module, inner: torch.optim.Optimizer
) -> LocalSGD | DiLoCo:
    island = case["island"]
    if island["method"] == "local_sgd":
        return LocalSGD(manager, model, inner, sync_every=island["sync_steps"])
    fragments = [_fragment(model, names) for names in case["fragments"]]
    outer = [
        torch.optim.SGD(
            fragment.parameters(),
            lr=island["outer_learning_rate"],
            momentum=island["outer_momentum"],
            nesterov=True,
        )
        for fragment in fragments
    ]
    return DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=island["sync_steps"],
        fragment_sync_delay=island["delay_steps"],
        fragment_update_alpha=island["mixing"],
    )


def _agreed(averaging: LocalSGD | DiLoCo, model: nn.Module, number: int) -> dict[str, Tensor]:
    """What the synchronisation that was just done has come to."""
    if isinstance(averaging, LocalSGD):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    fragments = averaging._fragments
    found = fragments[number % len(fragments)].original_parameters
    return {name.replace("/", "."): tensor.clone() for name, tensor in found.items()}


def train(folder: Path, name: str) -> None:
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=case["learning_rate"], weight_decay=0.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{case['port']}",
        replica_id=name,
        hostname="127.0.0.1",
        init_sync=False,
    )
    agreed: list[dict[str, Tensor]] = []
    with _averaging(case, manager, model, inner) as averaging:
        for step in _load_steps(folder / f"{name}.safetensors"):
            items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
            inner.zero_grad()
            for batch in step:
                labels = batch.pop("labels")[:, 1:].flatten()
                logits = model(**batch).logits[:, :-1].flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                (loss / items).backward()
            nn.utils.clip_grad_norm_(model.parameters(), case["max_grad_norm"])
            inner.step()
            if manager.current_step() > len(agreed):
                agreed.append(_agreed(averaging, model, len(agreed)))
    tensors = {f"{k}/{key}": t for k, found in enumerate(agreed) for key, t in found.items()}
    save_file(tensors, folder / f"{name}.agreed.safetensors")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[2:]:
        train(Path(argument), sys.argv[1])
