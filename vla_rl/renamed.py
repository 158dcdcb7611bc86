"""Old names of modules and of public names, importable for one more release.

`vla_rl.recipes.training` is `vla_rl.training.run` now.

An import of an old name returns the module itself, not a copy, with a DeprecationWarning.
`python -m` accepts old names too.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    # the import system asks for the methods alone; the module of the class imports a dozen others,
    # for which each process of a run would wait
    Loader = object

RENAMED: Final = MappingProxyType(
    {
        "recipes.report": "commands.report",
        "recipes.nodes": "nodes",
        "recipes.pipelines": "pipelines",
        "recipes.evaluation": "evaluation",
        "recipes.training_config": "pipelines.config",
        "recipes.training": "training.run",
        "recipes.parts": "training.parts",
        "recipes.pools": "training.pools",
        "recipes.agents": "training.agents",
        "recipes.team": "training.team",
        "recipes.recording": "training.recording",
        "recipes.chaos": "training.chaos",
        "recipes.saving": "training.saving",
        "recipes.resuming": "training.resuming",
        "recipes.run_record": "training.run_record",
        "recipes.arguments": "training.checks",
        "recipes.failures": "training.failures",
        "recipes.lasting_output": "training.lasting_output",
        "recipes.stopping": "training.stopping",
        "recipes.teaching": "training.supervised",
        "recipes.imitation": "training.imitation",
        "recipes.checkpoints": "models.loading",
        "recipes.command_line": "commands.command_line",
        "recipes.command_help": "commands.command_help",
        "recipes.config_files": "commands.config_files",
        "recipes.launching": "commands.launching",
        "recipes.plan": "commands.plan",
        "recipes.rehearsal": "commands.rehearsal",
        "recipes.opening": "commands.opening",
        "recipes.arithmetic_mix": "envs.text.arithmetic_mix",
        "recipes.pair_mix": "envs.text.pair_mix",
        "evaluation.pictures": "evaluation.scenes",
        "evaluation.metaworld": "evaluation.scenes",
        "simulation.bench": "simulation.pooled_process",
        "simulation.hosted": "simulation.worker",
        "simulation.lease": "simulation.handle",
        "simulation.restarts": "simulation.replacements",
        "simulation.simulator": "simulation.process",
        "simulation.remote_env": "simulation.process",
        "algorithms.losses.clipped_surrogates": "algorithms.losses.policy.ppo",
        "algorithms.losses.decoupled": "algorithms.losses.policy.decoupled_ppo",
        "algorithms.losses.whole_choices": "algorithms.losses.whole_batch",
        "training.arguments": "training.checks",
        "envs.libero.graphics": "envs.mujoco.graphics",
        "envs.libero.cameras": "envs.mujoco.cameras",
        "envs.libero.look": "envs.mujoco.look",
        "envs.libero.visible": "envs.mujoco.visible",
        "envs.libero.demonstrations": "envs.demonstrations",
        "engines.checkpoint": "learning.checkpoint",
        "engines.checkpoint_folders": "learning.checkpoint_folders",
        "engines.packing": "learning.packing",
        "engines.critic": "learning.critic",
        "engines.decisions": "learning.decisions",
        "engines.imitation": "learning.imitation",
        "engines.learner": "learning.learner",
        "engines.micro_batches": "learning.micro_batches",
        "engines.optimizer": "learning.optimizer",
        "engines.proximal": "learning.proximal",
        "engines.rows": "learning.rows",
        "engines.scoring": "learning.scoring",
        "engines.sound_numbers": "learning.sound_numbers",
        "engines.team": "learning.team",
        "engines.training": "learning.training",
        "engines.update_metrics": "learning.update_metrics",
    }
)
"""Each module or package that moved, below `vla_rl`."""

_MOVED_ATTRIBUTES: Final = MappingProxyType({"vla_rl.engines": "vla_rl.learning"})

_RENAMED_ATTRIBUTES: Final = MappingProxyType(
    {
        "vla_rl.actors": {"endpoint": "actor_method"},
        "vla_rl.algorithms": {"policy_loss_for": "safe_policy_loss"},
        "vla_rl.algorithms.losses": {"policy_loss_for": "safe_policy_loss"},
        "vla_rl.evaluation": {"numbers_in": "parse_numbers", "tasks_in": "parse_tasks"},
        "vla_rl.models.loading": {"device_for": "choose_device"},
        "vla_rl.rollout": {"PolicyEngine": "ActionEngine", "LanguageEngine": "ChatEngine"},
    }
)
"""Names that changed within their package."""


class _SameModule(Loader):
    """Loads the module of the new name under the old one."""

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module and keep its own spec, which the import system is about to replace."""
        module = import_module(self._new_name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module was executed before."""
        module.__spec__ = self._own_spec

    def get_code(self, old_name: str) -> CodeType | None:
        """Return what `python -m` with the old name runs."""
        spec = find_spec(self._new_name)
        loader: Any = None if spec is None else spec.loader
        return None if loader is None else loader.get_code(self._new_name)


class RenamedFinder:
    """Finds modules by their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module of an old name, or of a name below one.

        Return None for every other import.
        """
        new_name = new_name_of(name)
        if new_name is None:
            return None
        new = find_spec(new_name)
        if new is None:
            return None
        if name.removeprefix("vla_rl.") in RENAMED:  # once, not for every module of a package
            _warn(name, new_name)
        spec = ModuleSpec(name, _SameModule(new_name), origin=new.origin, is_package=False)
        spec.submodule_search_locations = new.submodule_search_locations
        return spec


def new_name_of(name: str) -> str | None:
    """Return the new name of a module, given its old one; None if it was not renamed."""
    if not name.startswith("vla_rl."):
        return None
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        found = RENAMED.get(".".join(parts[1:length]))
        if found is not None:
            return ".".join(["vla_rl", found, *parts[length:]])
    return None


def renamed_attribute(module: str, name: str) -> Any:
    """Return an attribute that a package had until it was renamed, or moved to another package.

    None if it never had it.
    """
    own_name = _RENAMED_ATTRIBUTES.get(module, {}).get(name)
    home = module if own_name is not None else _MOVED_ATTRIBUTES.get(module)
    if home is None or name.startswith("_"):
        return None
    new, new_name = import_module(home), own_name or name
    if new_name not in new.__all__:
        return None
    _warn(f"{module}.{name}", f"{home}.{new_name}")
    return getattr(new, new_name)


class RenamedProperty:
    """The old name of a property or attribute, in the class that has the new one."""

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self._names = f"{owner.__name__}.{name}", f"{owner.__name__}.{self._new_name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        _warn(*self._names)
        return getattr(instance, self._new_name)


def warn_of_base(base: type, kind: type) -> None:
    """Warn that a class became the base of two and that one of these is made now."""
    _warn(f"{base.__name__}(...)", f"{kind.__name__}(...)")


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is {new} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )


def install() -> None:
    """Put the finder before all others, once.

    Behind them, modules of a package that moved would be imported twice.
    """
    if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedFinder())
