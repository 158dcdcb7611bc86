"""Write what another project's functions gave: arrays to `<project>.npz`, and what was called to
`<project>.json`.
"""

import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import batches
import numpy as np
import torch
from torch import Tensor

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
            "ragged": batches.ragged(),
            "chunks": batches.chunks(),
            "far": batches.distant(),
        }
        self._arrays: dict[str, np.ndarray] = {}
        made_with = {"python": platform.python_version()}
        made_with |= {package: version(package) for package in ("torch", "numpy", *packages)}
        self._header: dict[str, Any] = {
            "project": project,
            "repository": repository,
            "commit": commit,
            "script": f"make/run_{project}.py",
            "seed": batches.SEED,
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
