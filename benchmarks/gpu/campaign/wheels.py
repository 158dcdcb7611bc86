"""The packages that the campaign needs beside torch, torchvision and NumPy, and how to carry them.

Versions are those of `constraints.txt`. `tests/devices` holds the list: a package that a stage loads
is on it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

CONSTRAINTS: Final = Path(__file__).parents[3] / "constraints.txt"

NAMES: Final = (
    "accelerate",
    "anyio",
    "charset-normalizer",
    "cloudpickle",
    "farama-notifications",
    "gymnasium",
    "h11",
    "httpcore2",
    "httpx2",
    "huggingface-hub",
    "idna",
    "joblib",
    "llguidance",
    "msgspec",
    "narwhals",
    "packaging",
    "peft",
    "protobuf",
    "psutil",
    "pyyaml",
    "pyzmq",
    "regex",
    "rich",
    "safetensors",
    "scikit-learn",
    "scipy",
    "sniffio",
    "threadpoolctl",
    "timm",
    "tokenizers",
    "tqdm",
    "transformers",
    "truststore",
    "uvloop",
)
"""Distributions, with what they need themselves."""

OF_TORCH: Final = frozenset(
    {
        "filelock",
        "fsspec",
        "jinja2",
        "markupsafe",
        "mpmath",
        "networkx",
        "numpy",
        "pillow",
        "setuptools",
        "sympy",
        "torch",
        "torchvision",
        "typing-extensions",
    }
)
"""Packages that a machine with torch and torchvision has already."""

PLATFORMS: Final = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")
"""Tags of their wheels. pip takes only the tags that it is given, and none that is older: llguidance
has 2_31 alone, and was not found."""


def pinned(names: tuple[str, ...] = NAMES) -> Mapping[str, str]:
    """Return the versions of packages."""
    lines = (line.strip().split("==") for line in CONSTRAINTS.read_text().splitlines())
    versions = {parts[0].lower().replace("_", "-"): parts[1] for parts in lines if len(parts) == 2}
    return {name: versions[name] for name in names}


def instructions() -> str:
    """Return the list, and the commands that fetch and install it."""
    wheels = " ".join(f"{name}=={version}" for name, version in pinned().items())
    platforms = " ".join(f"--platform {tag}" for tag in PLATFORMS)
    return (
        "The campaign needs torch >= 2.11 with CUDA, the torchvision that fits it, NumPy, and:\n\n"
        f"{wheels}\n\n"
        "Fetch them on a machine with a network (--python-version is that of the GPU host):\n\n"
        "python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \\\n"
        f"  {platforms} \\\n"
        f"  --dest wheels {wheels}\n\n"
        "and install them on the GPU host, beside its torch:\n\n"
        "python3 -m pip install --no-index --no-deps --target wheels-installed wheels/*.whl\n"
        "PYTHONPATH=wheels-installed python3 -m benchmarks.gpu --out runs/gpu --minutes 9"
    )
