"""Compare flow policies with other projects' outputs, and their folders with what was written.

Tiny networks, whose weights follow from their names, are compared with stored outputs of openpi,
LeRobot and RLinf (`tests/models/flow/golden`). Every shape, seed and step is read from the files, so another
set of the same layout can be compared (`VLA_RL_GOLDEN_FLOW=FOLDER`). Folders are written by the helpers of
the tests, which use none of our model code.
"""

import math
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.flow_nft import NftCases
from vla_rl.errors import CheckpointError
from vla_rl.models.flow.network import FlowInputs, Prefix, embed_time
from vla_rl.models.flow.pi import TIME_PERIODS
from vla_rl.models.flow.pi_folder import load_pi
from vla_rl.models.flow.smolvla import SmolVlaNetwork
from vla_rl.models.flow.smolvla_folder import load_smolvla
from vla_rl.models.flow.transitions import Method, Schedule, log_density
from vla_rl.models.small_files import save_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models" / "support"))
golden_flow, pi_folders, tiny_smolvla = (
    import_module(name) for name in ("golden_flow", "pi_folders", "tiny_smolvla")
)

METHODS: Final[dict[str, Method]] = {
    "flow_ode": "ode",
    "flow_sde": "flow_sde",
    "flow_cps": "flow_cps",
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return max |a - b| / max |b|; infinite for numbers that are none."""
    assert found.shape == expected.shape, f"{found.shape} instead of {expected.shape}"
    found, expected = found.double(), expected.double()
    scale = float(expected.abs().max())
    error = float((found - expected).abs().max()) / (scale or 1.0)
    # a NaN would get lost in the largest of several
    return math.inf if math.isnan(error) else error


@torch.no_grad()
def network_errors(network: Any, golden: dict[str, Tensor], inputs: FlowInputs) -> dict[str, float]:
    """Compare every output of a network that a golden file holds, by its name."""
    prefix, noise, time = network.embed_prefix(inputs), golden["in_noise"], golden["in_time"]
    late = time[:, None, None]
    mixed = late * noise + (1 - late) * golden["in_actions"]
    target = noise - golden["in_actions"]
    found = {
        "prefix_embeddings": network.embed_tokens(inputs)[0],
        "prefix_output": prefix.output,
        "prefix_pad_mask": prefix.mask,
        "prefix_positions": prefix.positions,
        "velocity_at_noise_time": network.velocity(prefix, noise, time),
        "loss": (network.velocity(prefix, mixed, time) - target) ** 2,
    }
    if "out_time_embedding" in golden:
        width = golden["out_time_embedding"].shape[1]
        found["time_embedding"] = embed_time(time, width, *TIME_PERIODS).float()
    for name in golden:
        layer = re.fullmatch(r"out_prefix_(key|value)_layer(-?\d+)", name)
        if layer:
            stored = prefix.keys if layer[1] == "key" else prefix.values
            found[name.removeprefix("out_")] = stored[int(layer[2])]
        steps = re.fullmatch(r"out_(actions|ode_chain)_k(\d+)", name)
        if steps:
            chain = _run_chain(network, prefix, noise, int(steps[2]))
            found[name.removeprefix("out_")] = chain if steps[1] == "ode_chain" else chain[:, -1]
    if hasattr(network, "read_chunk"):
        found["suffix_hidden_at_noise_time"] = network.read_chunk(prefix, noise, time)
    return {
        name: relative_error(tensor, golden[f"out_{name}"])
        for name, tensor in found.items()
        if f"out_{name}" in golden
    }


def _run_chain(network: Any, prefix: Prefix, x: Tensor, num_steps: int) -> Tensor:
    """Return all states of a deterministic chain, [B, K + 1, H, P]."""
    states = [x]
    for number in range(num_steps):
        time = torch.full((len(x),), 1.0 - number / num_steps)
        states.append(states[-1] - network.velocity(prefix, states[-1], time) / num_steps)
    return torch.stack(states, dim=1)


@torch.no_grad()
def step_errors(network: Any, golden: dict[str, Tensor], inputs: FlowInputs) -> dict[str, float]:
    """Compare means, standard deviations and densities of single steps of the network's own chain."""
    prefix, noise = network.embed_prefix(inputs), golden["in_noise"]
    errors: dict[str, float] = {}
    for name in (name for name in golden if name.startswith("out_mean_")):
        case = name.removeprefix("out_mean_")
        method, eta, steps, index = case.rsplit("_", 3)
        num_steps = int(steps.removeprefix("k"))
        step = torch.tensor([int(digit) for digit in index.removeprefix("i")])
        time = 1.0 - step / num_steps
        velocity = network.velocity(prefix, noise, time)
        schedule = Schedule(METHODS[method], num_steps, float(eta.removeprefix("eta")))
        found = schedule.transition(noise, velocity, step)
        robot_dim = golden[f"out_logprob_{case}"].shape[-1]
        density = log_density(golden["in_x_next"], found)[..., :robot_dim]
        for kind, tensor in (
            ("mean", found.mean),
            ("std", found.std),
            ("logprob", density),
            ("logprob_chunk", density.sum((1, 2))),
        ):
            errors[f"{kind}_{case}"] = relative_error(tensor, golden[f"out_{kind}_{case}"])
    return errors


def golden_errors() -> dict[str, float]:
    """Compare all networks with all golden files, by model, project and output."""
    errors: dict[str, float] = {}
    for kind in ("pi0", "pi05"):
        for project in ("lerobot", "openpi"):
            golden = golden_flow.golden_arrays(kind, project)
            network = golden_flow.golden_network(kind, project)
            inputs = golden_flow.golden_inputs(kind, project)
            found = network_errors(network, golden, inputs) | step_errors(network, golden, inputs)
            errors |= {f"{kind}/{project}/{name}": error for name, error in found.items()}
    golden = tiny_smolvla.golden_arrays()
    smolvla = SmolVlaNetwork(tiny_smolvla.TINY).eval()
    smolvla.load_state_dict(tiny_smolvla.golden_weights())
    found = network_errors(smolvla, golden, tiny_smolvla.golden_inputs())
    return errors | {f"smolvla/lerobot/{name}": error for name, error in found.items()}


def are_layouts_bit_equal() -> bool:
    """Return whether every layout's folder is written as it was read, tensors and small files."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folders = [
            write(root / f"{write.__name__}_{kind}", kind)
            for write in (pi_folders.write_openpi, pi_folders.write_lerobot)
            for kind in ("pi0", "pi05")
        ]
        same = [_comes_back(folder, load_pi(folder)) for folder in folders]
        folder = tiny_smolvla.write_smolvla(root / "smolvla")
        return all((*same, _comes_back(folder, load_smolvla(folder))))


def _comes_back(folder: Path, parts: Any) -> bool:
    saved = folder.with_name(f"{folder.name}_saved")
    save_folder(saved, parts.layout.write_tensors(parts.network), parts.layout.files)
    before, after = (load_file(each / "model.safetensors") for each in (folder, saved))
    small = [
        path for path in folder.rglob("*") if path.is_file() and path.name != "model.safetensors"
    ]
    return (
        before.keys() == after.keys()
        and all(torch.equal(before[name], after[name]) for name in before)
        and all(
            (saved / path.relative_to(folder)).read_bytes() == path.read_bytes() for path in small
        )
    )


def count_refused() -> int:
    """Return how many of the ten broken folders are refused in the words that name the fault."""
    refused = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, (change, words) in enumerate(pi_folders.BROKEN.values()):
            folder = pi_folders.write_lerobot(Path(scratch) / str(number), "pi05")
            pi_folders.load_for_robot(folder)  # whole, it loads
            change(folder)
            refused += _is_refused(folder, words)
    return refused


def _is_refused(folder: Path, words: str) -> bool:
    try:
        pi_folders.load_for_robot(folder)
    except CheckpointError as error:
        return re.search(words, str(error)) is not None
    return False


def measure_references() -> dict[str, float]:
    """Return the figures of this module by name."""
    errors = golden_errors()
    return {
        "golden_max_rel": max(errors.values()),
        "golden_arrays": len(errors),
        "golden_nft_max_rel": max(NftCases().errors().values()),
        "layouts_bit_equal": int(are_layouts_bit_equal()),
        "broken_folders_refused": count_refused(),
    }
