"""A loss is declared beside its function: its parameters, and what it needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

import vla_rl.algorithms.losses.policy
from vla_rl.algorithms.losses import (
    LOSSES,
    LossResult,
    PolicyLossConfig,
    TokenBatch,
    clipped_surrogate,
    declare_loss,
)
from vla_rl.algorithms.losses.declaration import ClipLow, declared_losses
from vla_rl.algorithms.losses.policy.ppo import PpoLossConfig
from vla_rl.cli.help import field_docs
from vla_rl.errors import ConfigError
from vla_rl.types import Config

ROOT = Path(__file__).parents[3]
FOLDER = Path(vla_rl.algorithms.losses.policy.__file__).parent


@pytest.fixture
def declared() -> Iterator[None]:
    """Forget the losses that a test declares."""
    from vla_rl.algorithms.losses import declaration

    before = dict(declaration._DECLARED)
    yield
    declaration._DECLARED.clear()
    declaration._DECLARED.update(before)


def test_every_file_declares_losses_and_names_them_in_its_first_line() -> None:
    files = {path.stem: set[str]() for path in FOLDER.glob("*.py")}
    del files["__init__"]
    for name, loss in LOSSES.items():
        files[loss.function.__module__.rpartition(".")[2]].add(name)
    for stem, names in files.items():
        first_line = ast.get_docstring(ast.parse((FOLDER / f"{stem}.py").read_text())).split("\n")[
            0
        ]
        assert names, stem
        assert names <= {stem, *re.findall(r"\w+", first_line)}, stem


def test_the_default_loss_comes_first_and_the_others_by_name() -> None:
    assert list(LOSSES) == ["ppo", *sorted(set(LOSSES) - {"ppo"})]


class ScaledLossConfig(Config, frozen=True, kw_only=True):
    clip_low: ClipLow = 0.1

    scale: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    """Factor of the loss."""


class RequiredLossConfig(Config, frozen=True, kw_only=True):
    scale: float


@pytest.mark.usefixtures("declared")
def test_the_fields_of_the_configuration_are_the_parameters() -> None:
    @declare_loss("scaled", has_trust_region=False, terms_without_advantage=("scale",))
    def scaled(batch: TokenBatch, config: ScaledLossConfig) -> LossResult:
        return clipped_surrogate(batch, PpoLossConfig(clip_low=config.clip_low))

    loss = declared_losses()["scaled"]
    assert (loss.function, loss.config) == (scaled, ScaledLossConfig)
    assert loss.defaults == {"clip_low": 0.1, "scale": 1.0}
    assert not loss.has_trust_region
    assert loss.terms_without_advantage == ("scale",)
    with pytest.raises(ValueError, match="'scaled' is declared twice"):
        declare_loss("scaled")(scaled)


@pytest.mark.usefixtures("declared")
def test_a_loss_without_a_configuration_or_with_a_parameter_without_a_default_is_refused() -> None:
    def without_configuration(batch: TokenBatch, *, scale: float = 1.0) -> LossResult:
        return clipped_surrogate(batch, PpoLossConfig())

    def without_default(batch: TokenBatch, config: RequiredLossConfig) -> LossResult:
        return clipped_surrogate(batch, PpoLossConfig())

    with pytest.raises(TypeError, match="`config` needs a subclass of Config as type"):
        declare_loss("scaled")(without_configuration)
    with pytest.raises(TypeError, match="RequiredLossConfig lacks 'scale'"):
        declare_loss("scaled")(without_default)


def test_every_parameter_is_an_option_whose_help_names_the_losses_that_have_it() -> None:
    docs = field_docs(PolicyLossConfig)
    for name, loss in LOSSES.items():
        assert name in docs["name"]
        for field, text in field_docs(loss.config).items():
            assert text[1:].removesuffix(".") in docs[field]
            is_common = field in ("clip_low", "clip_high", "dual_clip", "level")
            assert is_common or re.search(rf"\b{name}\b", docs[field])
    assert docs["clip_low"].startswith(
        "The ratio is clipped below 1 minus this value (at least 0 and at most 1). gmpo: lower bound"
    )
    assert docs["covariance_share"].startswith("clip_cov, kl_cov: share of the tokens")
    assert "kl" not in docs
    assert docs["allow_unbounded"].startswith("Accept a loss")


def test_a_field_that_no_loss_has_is_refused() -> None:
    with pytest.raises(TypeError, match="PolicyLossConfig has no field 'clip_lo'; did you mean"):
        PolicyLossConfig(clip_lo=0.1)
    with pytest.raises(
        ConfigError, match=r"PolicyLossConfig.level is 'tokn', .*did you mean 'token'"
    ):
        PolicyLossConfig(level="tokn")


def test_the_loss_of_the_contributing_page_is_added_with_one_file(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(r"```python\n   # (vla_rl/algorithms/\S+)\n(.*?)   ```", page, re.DOTALL)
    assert found is not None
    path, source = found[1], textwrap.dedent(found[2])
    # with the compiled modules, which would be made anew in seconds
    shutil.copytree(
        ROOT / "vla_rl",
        tmp_path / "vla_rl",
        ignore=shutil.ignore_patterns("assets"),
        copy_function=os.symlink,
    )
    (tmp_path / path).write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", USE_OF_THE_NEW_LOSS],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


USE_OF_THE_NEW_LOSS = """
import sys
from vla_rl.algorithms import PolicyLossConfig, policy_loss, safe_policy_loss
from vla_rl.cli.help import field_docs
from vla_rl.errors import ConfigError

config = PolicyLossConfig(name="tempered", temper=0.5)
assert "torch" not in sys.modules
assert config.parameters.temper == 0.5
help = "tempered: exponent of the ratio (at least 0 and at most 1)."
assert field_docs(PolicyLossConfig)["temper"] == help
assert config.declared.has_trust_region is False
for wrong in (dict(name="tempered", temper=2.0), dict(name="ppo", temper=0.5)):
    try:
        PolicyLossConfig(**wrong)
    except ConfigError as error:
        assert "temper" in str(error)
    else:
        raise AssertionError(wrong)

import torch
from vla_rl.algorithms import TokenBatch

one, two = torch.tensor([[1.0]]), torch.tensor([[4.0]])
batch = TokenBatch(two.log(), one.log(), one, torch.tensor([[True]]))
assert policy_loss(config)(batch)[0].tolist() == [[-2.0]]
"""
