"""The stages of the campaign in their order: correctness first, then what decides about a machine."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stage:
    """One process of the campaign."""

    name: str
    """Name of its module in this package, but for `update_...`."""

    title: str

    least_s: float
    """Seconds below which it is not begun."""

    most_s: float
    """Seconds after which it is ended; what it has found by then is kept."""


STAGES: Final = (
    Stage("machine", "The machine", 15.0, 60.0),
    Stage(
        "correctness", "CPU against device, graphs and compiled blocks against kernels", 20.0, 240.0
    ),
    Stage("gpu_tests", "Tests marked `gpu`", 20.0, 90.0),
    Stage("decisions", "Decisions a second", 60.0, 240.0),
    Stage("update_recomputed", "An update of adapters, activations recomputed", 40.0, 120.0),
    Stage("update_kept", "An update of adapters, activations kept", 40.0, 120.0),
    Stage("update_compiled", "An update of adapters, kept, blocks compiled", 60.0, 180.0),
    Stage("publication", "Publication of new weights", 30.0, 90.0),
    Stage("vllm", "Decisions by vLLM, and publication to it", 60.0, 240.0),
    Stage("update_all_weights", "An update of all weights, activations recomputed", 40.0, 120.0),
    Stage("profile", "Where the time goes", 30.0, 90.0),
    Stage("rendering", "Images on every EGL device and on the CPU", 20.0, 60.0),
)
