"""Builds of torch, torchvision and vLLM that fit each other; attention in both directions."""

import shlex
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vla_rl.cli.doctor.finding import Finding, Patient, not_finished
from vla_rl.cli.doctor.trial import try_apart
from vla_rl.errors import ConfigError
from vla_rl.util.installing import install_command

LOOK: Final = "from vla_rl.cli.doctor.torch_build import look_both_ways; look_both_ways()"
CAUSAL: Final = "attends causally"
LIBRARY: Final = "import sys; from vla_rl.cli.doctor.torch_build import load_library_of; load_library_of(sys.argv[1])"


def torch_that_computes(patient: Patient) -> Iterable[Finding]:
    """Check that vision towers can be built and computed, which takes torch, torchvision and timm,
    and that OpenVLA-OFT's trunk attends in both directions with this transformers.
    """
    looked = try_apart(["-c", LOOK], patient.seconds)
    if looked.is_late:
        yield not_finished("a small OpenVLA-OFT", patient.seconds)
    elif not looked.worked and CAUSAL in looked.words:
        yield Finding(
            f"OpenVLA-OFT's trunk does not attend in both directions ({looked.words})",
            "OpenVLA-OFT loses tens of points of success without an error",
            "Install the pinned release: `pip install 'transformers>=5.16.1,<5.20'`; remove code "
            "that changes its attention",
        )
    elif not looked.worked:
        yield Finding(
            f"a vision tower cannot be computed ({looked.words})",
            "No OpenVLA policy can be loaded",
            "Install builds of torch and torchvision of one release together: "
            "`pip install torch==2.13.* torchvision==0.28.*`, both from the same index",
        )


def look_both_ways() -> None:
    """Compute a small OpenVLA-OFT. Raises: ConfigError if it attends causally."""
    # first: the imports below take seconds before one of them asks for torchvision
    import_module("torchvision")

    import torch

    from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
    from vla_rl.models.prismatic.config import tiny
    from vla_rl.models.prismatic.trunk import require_bidirectional

    config = tiny()
    network = OpenVlaOftNetwork(config).eval()
    size = config.image_size
    with torch.no_grad():
        patches = network.vision_backbone(torch.zeros(1, 1, 3, size, size, dtype=torch.uint8))
    if not bool(patches.isfinite().all()):
        raise ArithmeticError("its patches are not finite")
    weight = network.language_model.lm_head.weight
    require_bidirectional(network.hidden_states, weight.shape[1], weight)


def vllm_that_fits(patient: Patient) -> Iterable[Finding]:
    """Check that an installed vLLM is the pinned one, and that its library loads beside this torch."""
    from vla_rl.engines.vllm.adapter import installed_build, require_vllm

    found = find_spec("vllm")
    if found is None or found.origin is None:
        return
    remedy = f"Run `{shlex.join(install_command('vllm'))}`, or remove vLLM if you do not use it"
    try:
        if installed_build() is not None:
            require_vllm()
    except ConfigError as error:
        yield Finding(str(error).rstrip("."), "--engine vllm refuses to start", remedy)
    looked = try_apart(["-c", LIBRARY, str(Path(found.origin).parent)], patient.seconds)
    if looked.lacks_instructions:
        yield Finding(
            f"vLLM's compiled library cannot run on this CPU ({looked.words})",
            "--engine vllm cannot start: this build of vLLM needs a CPU with AVX2 or AVX-512",
            "Use --engine torch, or another machine; in a virtual machine, pass the host's CPU on",
        )
    elif not looked.worked and not looked.is_late:
        yield Finding(
            f"vLLM's compiled library cannot be loaded beside torch {version('torch')} "
            f"({looked.words})",
            "--engine vllm cannot start: the build belongs to another torch",
            remedy,
        )


def load_library_of(vllm: str) -> None:
    """Load the compiled library that vLLM would load on this CPU, from the folder of its package.

    A build for CPUs brings one for each set of instructions, as vllm.platforms.cpu imports them;
    loading another one than its own ends the process by SIGILL.
    """
    import torch

    library = choose_library(
        {path.name.partition(".")[0]: path for path in sorted(Path(vllm).glob("_C*.so"))},
        has_avx512=torch.cpu._is_avx512_supported(),
        has_bf16=torch.cpu._is_avx512_bf16_supported(),
    )
    if library is not None:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def choose_library(
    libraries: Mapping[str, Path], *, has_avx512: bool, has_bf16: bool
) -> Path | None:
    """Choose among vLLM's libraries by name as vLLM does; None if there is none."""
    name = "_C" if has_avx512 and has_bf16 else "_C_AVX512" if has_avx512 else "_C_AVX2"
    # builds for GPUs and for other processors have `_C` alone
    return libraries.get(name, libraries.get("_C"))
