"""Builds of torch, torchvision and vLLM that fit each other, and attention that sees both ways."""

from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vla_rl.doctor.finding import Finding, Patient, not_finished
from vla_rl.doctor.trial import try_apart
from vla_rl.errors import ConfigError
from vla_rl.installing import install_command

TOWER: Final = (
    "import vla_rl, timm, torch; "
    "tower = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=0).eval(); "
    "found = tower(torch.zeros(1, 3, 224, 224)); assert found.isfinite().all()"
)
ATTENTION: Final = "from vla_rl.doctor.torch_build import look_both_ways; look_both_ways()"
LIBRARY: Final = "import sys, torch; torch.ops.load_library(sys.argv[1])"


def torch_and_torchvision(patient: Patient) -> Iterable[Finding]:
    """Check that a vision tower can be built and computes, which takes torch, torchvision and timm."""
    built = try_apart(["-c", TOWER], patient.seconds)
    if built.is_late:
        yield not_finished("a vision tower", patient.seconds)
    elif not built.worked:
        yield Finding(
            f"a vision tower cannot be computed ({built.words})",
            "No OpenVLA policy can be loaded",
            "Install builds of torch and torchvision of one release together: "
            "`pip install torch==2.13.* torchvision==0.28.*`, both from the same index",
        )


def attention_both_ways(patient: Patient) -> Iterable[Finding]:
    """Check that OpenVLA-OFT's trunk attends in both directions with this transformers."""
    looked = try_apart(["-c", ATTENTION], patient.seconds)
    if looked.is_late:
        yield not_finished("the look at OpenVLA-OFT's attention", patient.seconds)
    elif not looked.worked:
        yield Finding(
            f"OpenVLA-OFT's trunk does not attend in both directions ({looked.words})",
            "OpenVLA-OFT loses tens of points of success without an error",
            "Install the pinned release: `pip install 'transformers>=5.16.1,<5.20'`; remove code "
            "that changes its attention",
        )


def look_both_ways() -> None:
    """Raise ConfigError if a small OpenVLA-OFT of this installation attends causally."""
    from vla_rl.models.openvla_oft.config import tiny
    from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
    from vla_rl.models.prismatic.trunk import refuse_causal

    network = OpenVlaOftNetwork(tiny()).eval()
    weight = network.language_model.lm_head.weight
    refuse_causal(network.hidden_states, weight.shape[1], weight)


def vllm_that_fits(patient: Patient) -> Iterable[Finding]:
    """Check that an installed vLLM is the pinned one, and that its library loads beside this torch."""
    from vla_rl.engines.vllm.adapter import installed_build, require_vllm

    found = find_spec("vllm")
    if found is None or found.origin is None:
        return
    remedy = f"Run `{' '.join(install_command('vllm'))}`, or remove vLLM if you do not use it"
    try:
        if installed_build() is not None:
            require_vllm()
    except ConfigError as error:
        yield Finding(str(error).rstrip("."), "--engine vllm refuses to start", remedy)
    libraries = sorted(Path(found.origin).parent.glob("_C*.so"))
    for library in libraries[:1]:
        loaded = try_apart(["-c", LIBRARY, str(library)], patient.seconds)
        if not loaded.worked and not loaded.is_late:
            yield Finding(
                f"vLLM's compiled library cannot be loaded beside torch {version('torch')} "
                f"({loaded.words})",
                "--engine vllm cannot start: the build belongs to another torch",
                remedy,
            )
