"""Write what another project's functions gave for batches that are ragged, padded on the right, with junk in the
padding: arrays to `<project>.npz`, and what was called to `<project>.json`.
"""

import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEED = 20251122

LENGTHS = (9, 5, 1, 7, 3, 9, 4)
GROUP = (0, 0, 0, 1, 1, 2, 2)
REWARDS = (1.0, 0.0, 0.25, 0.75, 0.5, 1.0, 0.25)
"""Every group has several members and rewards that differ: what projects do with other groups is a
case of its own."""


def ragged() -> dict[str, np.ndarray]:
    """Make 7 responses of up to 9 tokens, in 3 groups; float64.

    `mask` is the padding, `holed_mask` also leaves out tokens in between (answers of a tool).
    Log-probs of the four policies are near each other, so that every clip and mask meets tokens on
    both of its sides. In padding and holes stand numbers like any other, that must not count.
    """
    rng = np.random.default_rng(SEED)
    rows, tokens = len(LENGTHS), max(LENGTHS)
    shape = (rows, tokens)
    mask = np.arange(tokens)[None] < np.array(LENGTHS)[:, None]
    holed = mask.copy()
    holed[0, 2:4] = holed[3, 3] = holed[5, 5:8] = False
    behavior = -0.05 - np.abs(rng.normal(1.2, 0.8, shape))
    near = {
        "log_prob": behavior + rng.normal(0.0, 0.35, shape),
        "proximal_log_prob": behavior + rng.normal(0.0, 0.25, shape),
        "reference_log_prob": behavior + rng.normal(0.0, 0.6, shape),
    }
    rewards = np.array(REWARDS)
    last = np.zeros(shape)
    last[np.arange(rows), np.array(LENGTHS) - 1] = rewards
    steps = np.where(holed, rng.normal(0.0, 1.0, shape), 0.0)
    values = rng.normal(0.5, 0.5, shape)
    return {
        "mask": mask,
        "holed_mask": holed,
        "group": np.array(GROUP),
        "rewards": rewards,
        "outcome_by_token": last,
        "reward_by_token": np.where(mask, rng.normal(0.0, 1.0, shape), 0.0),
        "reward_by_step": steps,
        "greedy_rewards": rng.uniform(0.0, 1.0, rows),
        "behavior_log_prob": behavior,
        **{name: np.minimum(value, -1e-3) for name, value in near.items()},
        "advantage": rng.normal(0.0, 1.0, shape),
        "advantage_by_sequence": np.repeat(rng.normal(0.0, 1.0, (rows, 1)), tokens, axis=1),
        "old_values": values,
        "values": values + rng.normal(0.0, 0.4, shape),
        "returns": values + rng.normal(0.0, 1.0, shape),
    }


def chunks() -> dict[str, np.ndarray]:
    """Make 8 action chunks of 3 control steps of 2 tokens each, some cut short; float64.

    One advantage for each control step, and one for each chunk.
    """
    rng = np.random.default_rng(SEED + 1)
    rows, steps, dims = 8, 3, 2
    executed = np.array((3, 1, 2, 3, 3, 2, 3, 3))
    behavior = -0.05 - np.abs(rng.normal(1.0, 0.6, (rows, steps, dims)))
    return {
        "step_mask": np.arange(steps)[None] < executed[:, None],
        "behavior_log_prob": behavior,
        "proximal_log_prob": np.minimum(behavior + rng.normal(0.0, 0.15, behavior.shape), -1e-3),
        "log_prob": np.minimum(behavior + rng.normal(0.0, 0.2, behavior.shape), -1e-3),
        "advantage_by_step": rng.normal(0.0, 1.0, (rows, steps)),
        "advantage_by_chunk": rng.normal(0.0, 1.0, rows),
    }


def distant() -> dict[str, np.ndarray]:
    """Make two policies from equal to as far apart as clamps reach: differences of 0, +-0.5, +-2,
    +-3.5 and +-25 nats.
    """
    difference = np.array([[0.0, 0.5, -0.5, 2.0, -2.0, 3.5, -3.5, 25.0, -25.0]])
    log_prob = np.full_like(difference, -26.0)
    return {"log_prob": log_prob, "reference_log_prob": log_prob + difference}


FOLDER = Path(__file__).parent.parent


class Recorder:
    """The cases of one project.

    Args:
        project: the files' name.
        repository: where its code is.
        commit: whose functions are run; check it out.
        packages: whose versions matter.
    """

    def __init__(
        self, project: str, repository: str, commit: str, packages: tuple[str, ...] = ()
    ) -> None:
        self.project = project
        self.batches = {
            "ragged": ragged(),
            "chunks": chunks(),
            "far": distant(),
        }
        self._arrays: dict[str, np.ndarray] = {}
        made_with = {"python": platform.python_version()}
        made_with |= {package: version(package) for package in ("torch", "numpy", *packages)}
        self._header: dict[str, Any] = {
            "project": project,
            "repository": repository,
            "commit": commit,
            "script": f"make/run_{project}.py",
            "seed": SEED,
            "made_with": made_with,
            "cases": {},
        }

    def tensors(
        self, batch: str = "ragged", dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        """A batch as tensors: numbers in `dtype`, masks as bool, ids as int64."""
        made = {name: torch.from_numpy(value.copy()) for name, value in self.batches[batch].items()}
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in made.items()
        }

    def case(
        self,
        name: str,
        function: str,
        outputs: Mapping[str, Any],
        *,
        batch: str = "ragged",
        **options: Any,
    ) -> None:
        """Keep what `function` gave for the inputs of `batch`, with options that a person
        can read.
        """
        assert name not in self._header["cases"], name
        arrays = {
            key: np.asarray(torch.as_tensor(value).detach()) for key, value in outputs.items()
        }
        self._arrays |= {f"{name}/{key}": value for key, value in arrays.items()}
        dtypes = sorted({str(value.dtype) for value in arrays.values()})
        self._header["cases"][name] = {
            "function": function,
            "batch": batch,
            "options": options,
            "outputs": sorted(arrays),
            "dtype": dtypes[0] if len(dtypes) == 1 else dtypes,
        }

    def save(self) -> None:
        """Write both files, and the batches, which are the same for every project."""
        inputs = {
            f"{name}/{key}": value
            for name, batch in self.batches.items()
            for key, value in batch.items()
        }
        np.savez_compressed(FOLDER / "batches.npz", allow_pickle=False, **inputs)
        np.savez_compressed(FOLDER / f"{self.project}.npz", allow_pickle=False, **self._arrays)
        (FOLDER / f"{self.project}.json").write_text(json.dumps(self._header, indent=1) + "\n")
        print(
            f"{self.project}: {len(self._header['cases'])} cases, "
            f"{sum(a.nbytes for a in self._arrays.values())} bytes"
        )


def loss_and_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> dict[str, Tensor]:
    """A scalar function's value and gradient."""
    leaf = at.clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": gradient}
