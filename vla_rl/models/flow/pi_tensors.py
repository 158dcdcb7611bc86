"""Tensors of pi0 and pi0.5 under the names of openpi and of LeRobot, to a network and back.

    project    prefix     image tower                    head of PaliGemma, never used, tied to the table
    openpi     none       vision_tower.vision_model.     one name of the two is in the file, or both
    LeRobot    model.     vision_tower. (transformers 5) likewise
                          vision_tower.vision_model.     (transformers 4)

Which model it is follows from the tensors: `time_mlp_in` is pi0.5's, `state_proj` is pi0's. Names are
strict both ways, and a folder is written with the names that it was read with.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.normalization import Project
from vla_rl.models.flow.pi import PiKind, PiSize, VisionSize
from vla_rl.models.flow.pi_layers import GemmaSize
from vla_rl.models.tensor_reading import iterate_tensors, list_some, tensor_files, tensor_shapes
from vla_rl.models.weight_files import check_names, check_weights
from vla_rl.util.arrays import require_finite

PREFIXES: Final[Mapping[Project, str]] = {"openpi": "", "lerobot": "model."}

VISION: Final = "paligemma_with_expert.paligemma.model.vision_tower."
OLD_VISION: Final = f"{VISION}vision_model."
TEXT: Final = "paligemma_with_expert.paligemma.model.language_model."
EXPERT: Final = "paligemma_with_expert.gemma_expert.model."
TABLE: Final = f"{TEXT}embed_tokens.weight"
HEAD: Final = "paligemma_with_expert.paligemma.lm_head.weight"
"""PaliGemma's head: the same numbers as the table of tokens."""

EXPERT_HEAD: Final = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""A head of the expert that nothing computes with; it is carried along."""

ANCHOR: Final = "action_in_proj.weight"
"""A tensor of every project's layout, by which its prefix is found."""

HEAD_SIZE: Final = 72
"""Width of a head of SigLIP So400m: 1152 / 16."""


@dataclass(frozen=True)
class PiLayout:
    """The names of one folder's tensors, and its small files; with a chain, a
    `FlowLayout` (`loading.FolderLayout`).

    Attributes:
        prefix: what every name begins with.
        has_old_vision: whether names of the image tower have `vision_model.`.
        tables: which of `TABLE` and `HEAD` the folder has.
        unused: tensors that are carried along, by bare name.
        files: small files by relative name.
    """

    prefix: str
    has_old_vision: bool
    tables: tuple[str, ...] = (TABLE,)
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every parameter under its name in the folder; views, but for a second name."""
        found = self._name_tensors(network)
        for second in self.tables[1:]:
            # a file of tensors takes no two that share their memory
            found[self.prefix + second] = found[self.prefix + second].clone()
        return found

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into a network.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        check_names(self._name_tensors(network), tensors)
        own = dict(network.state_dict())
        with torch.no_grad():
            for name, tensor in self._rename(tensors).items():
                own[name].copy_(tensor)

    def to_network(self, name: str) -> str:
        """Return the network's name of a tensor of the folder, without the folder's prefix."""
        bare = name.removeprefix(self.prefix)
        if bare == HEAD:
            return TABLE
        return bare.replace(OLD_VISION, VISION, 1) if self.has_old_vision else bare

    def _name_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every tensor of the folder by name; both names of a table have the same tensor."""
        found: dict[str, Tensor] = {}
        for name, tensor in network.state_dict().items():
            names = self.tables if name == TABLE else (self._to_folder(name),)
            found |= {self.prefix + each: tensor for each in names}
        return found | {self.prefix + name: tensor for name, tensor in self.unused.items()}

    def _to_folder(self, name: str) -> str:
        return name.replace(VISION, OLD_VISION, 1) if self.has_old_vision else name

    def _rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            inner = self.to_network(name)
            if inner in self.unused:
                continue
            if inner in found and not torch.equal(found[inner], tensor):
                raise CheckpointError(
                    f"{self.prefix}{TABLE} and {self.prefix}{HEAD} differ, expected the same numbers: "
                    "they are one table under two names."
                )
            found[inner] = tensor
        return found


@dataclass(frozen=True)
class TensorReport:
    """Findings from the headers of a folder's files.

    Attributes:
        kind: which model it is.
        shapes: shapes by the network's names.
        layout: how the folder names them, without carried tensors and files.
    """

    kind: PiKind
    shapes: Mapping[str, list[int]]
    layout: PiLayout


def inspect_tensors(folder: Path, project: Project) -> TensorReport:
    """Find out which model a folder holds, from the names of its tensors.

    Raises: CheckpointError for a prefix of another layout, or tensors of both models or of none.
    """
    shapes = tensor_shapes(folder, tensor_files(folder))
    prefix = PREFIXES[project]
    require_prefix(shapes, prefix, project, folder)
    bare = {name.removeprefix(prefix) for name in shapes}
    layout = PiLayout(
        prefix,
        has_old_vision=any(name.startswith(OLD_VISION) for name in bare),
        tables=tuple(name for name in (TABLE, HEAD) if name in bare) or (TABLE,),
    )
    inner = {
        layout.to_network(name): shape
        for name, shape in shapes.items()
        if name != prefix + EXPERT_HEAD
    }
    return TensorReport(identify_kind(bare, folder), inner, layout)


def require_prefix(names: Collection[str], prefix: str, project: Project, folder: Path) -> None:
    """Raise CheckpointError unless the tensors have the prefix of the project's layout."""
    if prefix + ANCHOR in names:
        return
    others = sorted(name.removesuffix(ANCHOR) for name in names if name.endswith(f".{ANCHOR}"))
    others = ["", *others] if ANCHOR in names else others
    if not others:
        raise CheckpointError(
            f"{folder} has no tensor {prefix}{ANCHOR}, expected the tensors of pi0 or pi0.5 in "
            f"{project}'s layout; it holds {list_some(sorted(names)[:4])}."
        )
    raise CheckpointError(
        f"the tensors of {folder} begin with {others[0]!r}, expected {prefix!r}, as {project}'s layout "
        "has it, which its config.json is of; a loader that matches names would leave every weight "
        "random. Rename the tensors, or use the config.json of the layout that wrote them."
    )


def identify_kind(names: Collection[str], folder: Path) -> PiKind:
    """Return which model the tensors are of, by their bare names. Raises: CheckpointError."""
    is_pi05 = "time_mlp_in.weight" in names
    is_pi0 = "state_proj.weight" in names or "action_time_mlp_in.weight" in names
    if is_pi0 == is_pi05:
        raise CheckpointError(
            f"{folder} has {'the' if is_pi0 else 'none of the'} tensors of "
            f"{'both pi0 and pi0.5' if is_pi0 else 'pi0 (state_proj) and of pi0.5 (time_mlp_in)'}, "
            "expected those of one."
        )
    return "pi05" if is_pi05 else "pi0"


def read_size(
    report: TensorReport, horizon: int, num_vision_heads: int | None, folder: Path
) -> PiSize:
    """Return the sizes of a network that takes the folder's tensors, from their shapes.

    Raises: CheckpointError if a tensor is missing that shows a size, or no network has such sizes.
    """
    shapes = report.shapes
    try:
        text, expert = (_read_gemma(shapes, trunk) for trunk in (TEXT, EXPERT))
        width, _, patch, _ = shapes[f"{VISION}embeddings.patch_embedding.weight"]
        num_patches = shapes[f"{VISION}embeddings.position_embedding.weight"][0]
        vision = VisionSize(
            width=width,
            depth=_count_layers(shapes, f"{VISION}encoder.layers."),
            mlp_width=shapes[f"{VISION}encoder.layers.0.mlp.fc1.weight"][0],
            num_heads=num_vision_heads or _guess_heads(width, folder),
            patch=patch,
            image_size=math.isqrt(num_patches) * patch,
        )
        return PiSize(
            kind=report.kind,
            text=text,
            expert=expert,
            vision=vision,
            vocabulary=shapes[TABLE][0],
            action_dim=shapes[ANCHOR][1],
            state_dim=shapes.get("state_proj.weight", shapes[ANCHOR])[1],
            horizon=horizon,
        )
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{folder} lacks tensors of {report.kind}, or they have impossible shapes: {error}"
        ) from error


def _read_gemma(shapes: Mapping[str, list[int]], trunk: str) -> GemmaSize:
    first = f"{trunk}layers.0."
    # both public sizes have one head of keys, so its rows are the size of a head
    head_size, width = shapes[f"{first}self_attn.k_proj.weight"]
    return GemmaSize(
        width=width,
        depth=_count_layers(shapes, f"{trunk}layers."),
        mlp_width=shapes[f"{first}mlp.up_proj.weight"][0],
        num_heads=shapes[f"{first}self_attn.q_proj.weight"][0] // head_size,
        head_size=head_size,
    )


def _count_layers(shapes: Collection[str], stack: str) -> int:
    return len(
        {name.removeprefix(stack).partition(".")[0] for name in shapes if name.startswith(stack)}
    )


def _guess_heads(width: int, folder: Path) -> int:
    if width % HEAD_SIZE == 0:
        return width // HEAD_SIZE
    raise CheckpointError(
        f"{folder}: its image tower is {width} wide, which is no SigLIP So400m, and its config.json "
        'does not say how many heads it has; add {"vision_config": {"num_attention_heads": ...}}.'
    )


def load_tensors(
    network: nn.Module, folder: Path, layout: PiLayout, device: torch.device
) -> dict[str, Tensor]:
    """Assign a folder's tensors to a network on the meta device, each in its stored dtype.

    Returns: tensors that are carried along, by bare name.

    Raises: CheckpointError for files that `check_weights` refuses, and for missing, surplus,
    misshapen or non-finite tensors.
    """
    check_weights(folder)
    unused: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in _iterate(folder):
        require_finite({name: tensor}, folder)
        if name == layout.prefix + EXPERT_HEAD:
            unused[EXPERT_HEAD] = tensor
            continue
        inner = layout.to_network(name)
        if inner in found and not torch.equal(found[inner].cpu(), tensor):
            raise CheckpointError(
                f"{folder}: {TABLE} and {HEAD} differ, expected the same numbers, because they are one "
                "table under two names."
            )
        found[inner] = tensor.to(device)
    network.load_state_dict(found, assign=True)
    return unused


def _iterate(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = tensor_files(folder)
    for file in dict.fromkeys(files.values()):
        yield from iterate_tensors(folder / file, [name for name in files if files[name] == file])


def require_same_names(network: nn.Module, report: TensorReport, folder: Path) -> None:
    """Raise CheckpointError listing missing, surplus and misshapen tensors, from headers alone."""
    with torch.device("meta"):
        held = {name: torch.empty(shape) for name, shape in report.shapes.items()}
    check_names(network.state_dict(), held, folder)
