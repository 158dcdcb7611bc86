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

import pytest

import vla_rl.algorithms.losses.policy
from vla_rl.algorithms.losses import (
    LOSSES,
    LossResult,
    Parameter,
    PolicyLossConfig,
    TokenBatch,
    clipped_surrogate,
    declare_loss,
)
from vla_rl.algorithms.losses.declaration import ClipLow, declared_losses
from vla_rl.cli.help import field_docs
from vla_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]
FOLDER = Path(vla_rl.algorithms.losses.policy.__file__).parent
Scale = Annotated[float, Parameter("factor of the loss.", above=0.0, most=2.0)]


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


@pytest.mark.usefixtures("declared")
def test_keyword_arguments_with_defaults_are_the_parameters() -> None:
    @declare_loss("scaled", has_trust_region=False, terms_without_advantage=("scale",))
    def scaled(batch: TokenBatch, *, clip_low: ClipLow = 0.1, scale: Scale = 1.0) -> LossResult:
        return clipped_surrogate(batch, clip_low=clip_low)

    loss = declared_losses()["scaled"]
    assert loss.function is scaled
    assert loss.defaults == {"clip_low": 0.1, "scale": 1.0}
    assert loss.parameters["scale"].parameter.help == "factor of the loss."
    assert not loss.has_trust_region
    assert loss.terms_without_advantage == ("scale",)
    with pytest.raises(ValueError, match="'scaled' is declared twice"):
        declare_loss("scaled")(scaled)


@pytest.mark.usefixtures("declared")
def test_a_parameter_without_default_or_help_is_refused() -> None:
    def without_default(batch: TokenBatch, *, scale: Scale) -> LossResult:
        return clipped_surrogate(batch)

    def without_help(batch: TokenBatch, *, scale: float = 1.0) -> LossResult:
        return clipped_surrogate(batch)

    for function in (without_default, without_help):
        with pytest.raises(TypeError, match=f"{function.__name__}: scale needs a default and"):
            declare_loss("scaled")(function)


@pytest.mark.parametrize(
    ("parameter", "text", "inside", "outside"),
    [
        (Parameter("", least=0.0), "at least 0", [0.0, 1e9], [-1e-9, float("nan")]),
        (Parameter("", least=0.0, most=1.0), "in [0, 1]", [0.0, 1.0], [-0.1, 1.1, float("nan")]),
        (Parameter("", above=1.0), "above 1", [1.1], [1.0, float("nan")]),
    ],
)
def test_a_range_has_its_ends_and_its_words(
    parameter: Parameter, text: str, inside: list[float], outside: list[float]
) -> None:
    assert parameter.range == text
    assert all(parameter.accepts(value) for value in inside)
    assert not any(parameter.accepts(value) for value in outside)


def test_every_parameter_is_an_option_whose_help_names_the_losses_that_have_it() -> None:
    docs = field_docs(PolicyLossConfig)
    for name, loss in LOSSES.items():
        assert name in docs["name"]
        for field, each in loss.parameters.items():
            assert each.parameter.help in docs[field]
            assert each.parameter.is_common or re.search(rf"\b{name}\b", docs[field])
    assert docs["clip_low"].startswith("The ratio is clipped below 1 minus this value. gmpo: ")
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
assert config.parameters == {"temper": 0.5}
assert field_docs(PolicyLossConfig)["temper"] == "tempered: exponent of the ratio."
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
