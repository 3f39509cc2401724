"""Settings of pictures, and of the modules that see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import model_validator

from hetero_framework.config import DataConfig, ModelConfig
from hetero_framework.config.problems import Problem
from hetero_framework.config.section import FREE, ON_CARD, Name, ReadIf, with_unit

_SEES = ReadIf("training.objective=image-text-to-text|image-dpo|image-kto")
_Pixels = Annotated[int, with_unit("pixels", ge=1)]


class PictureSettings(DataConfig):
    """The data section with the sizes of pictures."""

    cache_image_features: Annotated[bool, _SEES, FREE] = False
    """Keep what the frozen part of the model that sees makes of a micro-batch's pictures on the
    first stage's disk, for later epochs and runs in which they come together again."""
    image_max_pixels: Annotated[_Pixels | None, _SEES] = None
    """Pictures with more pixels are made smaller, so that they have fewer tokens; for models whose
    processor keeps a picture's shape. null: as the processor says. Elsewhere: max_pixels."""
    image_min_pixels: Annotated[_Pixels | None, _SEES] = None
    """Pictures with fewer pixels are made larger. null: as the processor says. Elsewhere:
    min_pixels."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> PictureSettings:
        if (self.image_min_pixels or 1) > (self.image_max_pixels or self.image_min_pixels or 1):
            raise ValueError("image_min_pixels is more than image_max_pixels")
        return self


class TowerSettings(ModelConfig):
    """The model section with what is trained of the modules that see."""

    train_towers: Annotated[bool | tuple[Name, ...], _SEES, ON_CARD] = False
    """Whether the vision tower and the projector are trained, too. In full training a list names
    the modules to train, by their last names as in adapter.target_modules: "multi_modal_projector",
    "merger". With an adapter, true lets adapter.target_modules reach them, as in PEFT."""

    @property
    def trained_towers(self) -> bool | tuple[str, ...]:
        return self.train_towers or super().trained_towers


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    model, adapter = parts.get("model"), parts.get("adapter")
    if adapter is not None and model is not None and isinstance(model.trained_towers, tuple):
        yield Problem(
            "model.train_towers",
            "is a list, for full training; set it to true: adapter.target_modules says what gets"
            " an update",
        )
