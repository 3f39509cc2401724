"""Data settings of pictures."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from hetero_framework.config import DataConfig
from hetero_framework.config.section import FREE, ReadIf, with_unit

_SEES = ReadIf("training.objective=image-text-to-text|image-dpo")
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
