"""A ResNet as a chain of modules, cut over machines:

    hetero train --config examples/resnet.json --import examples/resnet.py

Its pictures are made up: squares of one of four colours, with noise. Replace `train_set`,
`test_set` and `resnet` by your own; each child of the nn.Sequential may be on another machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import TensorDataset

CLASSES, SIZE = 4, 16


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != channels:
            convolution = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, pictures: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(pictures)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(pictures))


def resnet() -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2), Residual(32, 32, 1)]
    return nn.Sequential(stem, *blocks, head)


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over the examples of a micro-batch, and the means that `loss_metrics` names."""
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
