"""A vision transformer as a chain of modules, with a boundary of two tensors:

    hetero train --config examples/vit.json --import examples/vit.py

Between its blocks go the tokens of a picture and the sum of what all blocks so far have made of
them, by name. Its pictures are those of examples/resnet.py, made up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

CLASSES, SIZE, PATCH, WIDTH = 4, 16, 4, 32


class Patches(nn.Module):
    """Pictures to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        tokens = self.project(pictures).flatten(2).transpose(1, 2) + self.places
        return {"tokens": tokens, "total": torch.zeros_like(tokens)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )

    def forward(self, bundle: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = self.layer(bundle["tokens"])
        return {"tokens": tokens, "total": bundle["total"] + tokens}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, bundle: dict[str, Tensor]) -> Tensor:
        classes: Tensor = self.classes(self.norm(bundle["total"].mean(1)))
        return classes


def vit() -> nn.Sequential:
    return nn.Sequential(Patches(), *(Block() for _ in range(4)), Head())


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = output.argmax(-1) == target
    return cross_entropy(output, target), {"accuracy": right.float().mean()}


loss_metrics = ("accuracy",)


def pictures(count: int, seed: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=dice)
    colours = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(count, 3, SIZE, SIZE, generator=dice)
    return TensorDataset(colours[classes] + 0.7 * noise, classes)


train_set, test_set = pictures(256, 1), pictures(64, 2)
