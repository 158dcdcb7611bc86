"""After `import vla_rl`, whatever imports torchvision works beside a CPU build of torch, in any
order.
"""

import json
import subprocess
import sys

import pytest

ORDERS = {
    "torch, vla_rl, then timm": "import torch, vla_rl, timm; timm.create_model('resnet10t')",
    "transformers, vla_rl, then what brings torchvision": """
import transformers, vla_rl
from transformers import AutoProcessor, AutoVideoProcessor, LlamaForCausalLM
""",
    "torchvision in vain, then vla_rl": """
try:
    import torchvision
except RuntimeError as error:
    assert "torchvision::" in str(error)
import vla_rl, torchvision
assert torchvision.__version__
""",
}


EACH_IN_A_FORK = """
import json, os, sys, traceback
# The first import of every order, and a part of torch that torchvision imports: once for all.
import torch, torch._dynamo
for name, order in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            exec(order, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.wait()[1])]), flush=True)
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, int]:
    """Exit status of each order; errors are in the output that pytest has captured."""
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, json.dumps(ORDERS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    print(done.stderr)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("order", ORDERS)
def test_torchvision_imports_after_vla_rl(order: str, ended: dict[str, int]) -> None:
    assert ended[order] == 0


def test_importing_vla_rl_or_looking_for_torchvision_brings_no_torch() -> None:
    code = """
import sys, vla_rl
from importlib.util import find_spec
print(bool(find_spec("torchvision")), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "False"]


def test_another_error_of_torchvision_is_raised_as_it_is() -> None:
    code = """
import sys, vla_rl, importlib.abc, importlib.machinery

class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torchvision" else None

    def exec_module(self, module):
        raise RuntimeError("no such library")

sys.meta_path.insert(1, Broken())
try:
    import torchvision
except RuntimeError as error:
    print(error, "torchvision" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "no such library False"
