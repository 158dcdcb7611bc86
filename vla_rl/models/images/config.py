"""Configuration of the training augmentation. Importing it does not import torch."""

from vla_rl.types import Config


class AugmentationConfig(Config, frozen=True, kw_only=True):
    """Strength of the augmentation; the defaults are OpenVLA's."""

    crop_area: float = 0.9
    """Share of the area that a random crop keeps."""

    brightness: float = 0.2
    """Largest value added to all pixel values, which lie between 0 and 1; drawn from [-brightness,
    brightness]."""

    contrast: tuple[float, float] = (0.8, 1.2)
    """Range of the contrast factor, which scales the distance of values from their channel's
    mean."""

    saturation: tuple[float, float] = (0.8, 1.2)
    """Range of the saturation factor."""

    hue: float = 0.05
    """Largest rotation of the hue, as a share of the colour circle."""

    def __post_init__(self) -> None:
        self.require(0.0 < self.crop_area <= 1.0, "crop_area", "a share above 0, at most 1")
        self.require(0.0 <= self.brightness <= 1.0, "brightness", "0 to 1")
        self.require(0.0 <= self.hue <= 0.5, "hue", "0 to 0.5")
        for field in ("contrast", "saturation"):
            low, high = getattr(self, field)
            self.require(0.0 <= low <= high, field, "two factors with 0 <= low <= high")
