"""Makes vLLM import beside a CPU build of torch, in this process and in those that vLLM starts.

vLLM imports torchvision, which a CPU build of torch breaks unless `vla_rl.models.torchvision_ops` comes first. Engine
processes have this folder on their PYTHONPATH, so Python runs this file before anything else. Processes that never import
vLLM (multiprocessing's own helpers) are left as they are.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType


class BeforeVllm:
    """A finder that finds nothing, but has the operators declared as soon as someone looks for vllm."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called for every import; the first one of vllm brings the operators."""
        if name == "vllm":
            sys.meta_path.remove(self)
            import_module("vla_rl.models.torchvision_ops")
        return None


sys.meta_path.insert(0, BeforeVllm())
