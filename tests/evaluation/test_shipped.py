"""Which of the shipped policies acts, and what is said if it sees other images than it was taught."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from vla_rl.envs.libero.assets import ASSETS_VARIABLE
from vla_rl.errors import ConfigError
from vla_rl.evaluation.shipped import other_pictures, resolve_checkpoint
from vla_rl.models.loading import BASE_POLICY, SHIPPED, STAND_INS_BASE_POLICY
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import TrainingImages, tiny


@pytest.fixture
def own_assets(tmp_path: Path) -> str:
    """A folder that looks like LIBERO's own assets."""
    for name in ("scenes", "textures"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


def test_the_shipped_policy_that_acts_is_the_one_of_the_assets_in_use(
    own_assets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_checkpoint(SHIPPED, "stand-ins") == str(STAND_INS_BASE_POLICY)
    assert resolve_checkpoint(SHIPPED, own_assets) == str(BASE_POLICY)
    monkeypatch.setenv(ASSETS_VARIABLE, own_assets)
    assert resolve_checkpoint(SHIPPED, None) == str(BASE_POLICY)
    assert resolve_checkpoint(SHIPPED, "stand-ins") == str(STAND_INS_BASE_POLICY)


def test_a_policy_that_was_asked_for_acts_on_any_assets(own_assets: str) -> None:
    for asked in ("mine", str(STAND_INS_BASE_POLICY), "openvla/openvla-7b"):
        assert resolve_checkpoint(asked, own_assets) == asked


def test_assets_that_are_not_there_are_an_error_before_any_policy_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LIBERO's assets were not found in"):
        resolve_checkpoint(SHIPPED, str(tmp_path / "none"))


def test_both_shipped_policies_are_there() -> None:
    assert all(
        (base / "model.safetensors").is_file() for base in (BASE_POLICY, STAND_INS_BASE_POLICY)
    )


@pytest.mark.parametrize(
    ("policy", "source", "size", "quality", "expected"),
    [
        (STAND_INS_BASE_POLICY, "wheels", 84, "fast", "on stand-ins, not on wheels"),
        (BASE_POLICY, "stand-ins", 84, "fast", "on LIBERO's own assets, not on stand-ins"),
        (BASE_POLICY, "package", 84, "exact", "in the quality fast, not exact"),
        (BASE_POLICY, "package", 224, "fast", "at 84 pixels, not 224"),
    ],
)
def test_one_line_says_that_a_shipped_policy_sees_other_images_than_it_was_taught(
    policy: Path, source: str, size: int, quality: str, expected: str
) -> None:
    line = other_pictures(str(policy), source, size, quality)  # type: ignore[arg-type]
    assert line is not None
    assert expected in line
    assert "\n" not in line


def test_one_line_says_it_of_a_policy_that_was_trained_here_too(tmp_path: Path) -> None:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=1, action_dim=7)
    pictures = TrainingImages(image_size=84, quality="fast", assets="own")
    OpenVlaOft.create(replace(shape, pictures=pictures), seed=0).save(tmp_path / "mine")
    mine = str(tmp_path / "mine")
    line = other_pictures(mine, "stand-ins", 256, "exact")
    assert line == (
        f"{mine} was trained on LIBERO's own assets, not on stand-ins; in the quality fast, not exact; "
        "at 84 pixels, not 256: it does worse on these images"
    )
    assert other_pictures(mine, "wheels", 84, "fast") is None
    OpenVlaOft.load(mine).save(tmp_path / "again")
    assert other_pictures(str(tmp_path / "again"), "wheels", 84, "exact") is not None


def test_images_as_a_policy_was_taught_them_need_no_line() -> None:
    assert other_pictures(str(STAND_INS_BASE_POLICY), "stand-ins", 84, "fast") is None
    assert other_pictures(str(BASE_POLICY), "wheels", 84, "fast") is None
    assert other_pictures("openvla/openvla-7b", "wheels", 256, "exact") is None
