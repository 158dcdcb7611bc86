"""The recipes that train by reinforcement learning."""

import importlib
import pkgutil
from typing import Any

import vla_rl.recipes
from vla_rl.pipelines.config import LearningConfig


def training_recipes() -> list[Any]:
    """Return the configuration of each."""
    kinds = []
    for found in pkgutil.iter_modules(vla_rl.recipes.__path__):
        module = importlib.import_module(f"vla_rl.recipes.{found.name}")
        name = f"{found.name.replace('_', '')}config"
        kinds += [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, LearningConfig)
            and kind.__module__ == module.__name__
            and kind.__name__.lower() == name
            and not found.name.endswith("_training")
        ]
    return kinds
