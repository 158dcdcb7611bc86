"""A tiny pi0 and pi0.5 as the golden files of other projects' code have them."""

from golden_flow import GOLDEN, make_inputs, read_arrays, read_names, weight_by_formula
from torch import Tensor

from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.pi import PiKind, PiNetwork
from vla_rl.models.flow.pi_tensors import PiLayout, TensorReport, read_size

VISION_HEADS = 4
"""Heads of the image tower, which no tensor shows."""


def golden_names(name: str) -> dict[str, list[int]]:
    """Return the shapes of all tensors by name, as the other project's module lists them."""
    shapes: dict[str, list[int]] = read_names(name)["shapes"]
    return shapes


def golden_weights(name: str) -> dict[str, Tensor]:
    """Return the tensors of `pi0`, `pi05`, `pi0_openpi` or `pi05_openpi` under that project's names."""
    held = read_names(name)
    phase = held["set"]["phase"]
    return {each: weight_by_formula(each, shape, phase) for each, shape in held["shapes"].items()}


def golden_network(kind: PiKind, project: str) -> PiNetwork:
    """Return a network with the golden weights of `lerobot` or `openpi`, in the sizes that these show."""
    tensors = {
        name.replace("vision_tower.vision_model.", "vision_tower."): tensor
        for name, tensor in golden_weights(_names_file(kind, project)).items()
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    report = TensorReport(kind, shapes, PiLayout("", has_old_vision=False))
    horizon = golden_arrays(kind, project)["in_noise"].shape[1]
    network = PiNetwork(read_size(report, horizon, VISION_HEADS, GOLDEN)).eval()
    network.load_state_dict(tensors)
    return network


def golden_arrays(kind: PiKind, project: str) -> dict[str, Tensor]:
    """Return the golden inputs and outputs by name."""
    suffix = "lerobot" if project == "lerobot" else "openpi_rlinf_flow_sde"
    return read_arrays(f"{kind}_{suffix}")


def golden_inputs(kind: PiKind, project: str) -> FlowInputs:
    """Return the golden observations."""
    settings = read_names(_names_file(kind, project))["set"]
    return make_inputs(golden_arrays(kind, project), settings)


def _names_file(kind: PiKind, project: str) -> str:
    return kind if project == "lerobot" else f"{kind}_openpi"
