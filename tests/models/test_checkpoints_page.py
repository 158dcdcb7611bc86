"""docs/checkpoints.md does what it says, on a checkpoint that was written without the project's
model code.
"""

import re
from pathlib import Path
from typing import Any

import golden_checkpoint
import public_checkpoint
import pytest
import torch
from golden_checkpoint import HEAD, PROPRIO

from vla_rl.models.openvla_oft import CONVENTIONS, OpenVlaOft
from vla_rl.models.prismatic import folder
from vla_rl.models.prismatic.config import TINY_TOKENIZER

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What stands after all snippets ran."""
    names: dict[str, Any] = {}
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
    ):
        exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "tiny"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


def test_a_public_checkpoint_is_loaded_adapted_merged_and_saved(
    page: dict[str, Any], public: Path, tmp_path: Path
) -> None:
    policy = page["load_mine"](public)
    adapted = page["with_adapters"](policy)
    assert any(".lora_A." in name for name in adapted.checkpoint_tensors())
    page["for_others"](adapted, tmp_path / "mine")
    again = OpenVlaOft.load(tmp_path / "mine")
    assert again.checkpoint_tensors().keys() == policy.checkpoint_tensors().keys()
    assert all(
        torch.equal(tensor, again.checkpoint_tensors()[name])
        for name, tensor in policy.checkpoint_tensors().items()
    )


def test_an_adapter_is_put_on_its_base_and_trained_further(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = golden_checkpoint.write(tmp_path / "base")
    run = golden_checkpoint.write(tmp_path / "run", HEAD, PROPRIO)
    golden_checkpoint.write_adapter(run / "lora_adapter")
    monkeypatch.setattr(
        folder, "download", lambda hub_id, without: {"openvla/openvla-7b": base}[hub_id]
    )
    assert page["on_its_base"](run).config.lora is None
    assert page["trained_further"](run).config.lora.targets == "all-linear"


def test_the_page_names_every_dialect() -> None:
    assert all(f"`{dialect}`" in PAGE.read_text() for dialect in CONVENTIONS)


@pytest.mark.parametrize(
    ("dialect", "images", "has_stop_token"),
    [
        ("simplevla", "exact", True),
        ("simplevla_robotwin", "crop", True),
        ("rlinf", "bicubic_float", False),
        ("rlinf_official", "bicubic_pillow", True),
        ("rlinf_robotwin", "crop", True),
    ],
)
def test_a_dialect_settles_images_and_the_stop_token(
    dialect: Any, images: str, has_stop_token: bool, public: Path
) -> None:
    config = OpenVlaOft.load(public, norm_key="libero_goal", dialect=dialect).config
    assert (config.images, config.has_stop_token) == (images, has_stop_token)
    assert config.action_bounds.epsilon == 1e-8
