"""A loss is declared beside its function: its parameters, what it needs, which config means it, what is refused."""

import ast
import math
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
import torch
from small_batches import batch_of, gradient, random_batch, ratios_of, row

import vla_rl.algorithms.losses.policy
from vla_rl.algorithms.losses import (
    LOSSES,
    PARAMETERS,
    POLICY_LOSSES,
    CorrectionConfig,
    Diagnostics,
    KlLossConfig,
    LossResult,
    PolicyLossConfig,
    TokenBatch,
    clipped_surrogate,
    declare_loss,
    policy_loss,
    safe_policy_loss,
)
from vla_rl.algorithms.losses.declaration import ClipLow, declared_losses, diagnose
from vla_rl.algorithms.losses.policy.ppo import GspoLossConfig, PpoLossConfig
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


def scaled_policy_gradient(
    batch: TokenBatch, *, clip_high: float = 1.0
) -> tuple[torch.Tensor, Diagnostics]:
    """A loss of somebody's own: -A * log_prob * clip_high."""
    losses = -batch.masked_advantage * batch.masked_log_prob * clip_high
    return losses, diagnose(batch.masked_log_prob.detach(), batch.mask)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_parameters_of_a_loss_are_the_fields_of_its_configuration(name) -> None:
    own = LOSSES[name].config(**dict(list(PARAMETERS[name].items())[:1]))
    config = PolicyLossConfig.from_parameters(own, allow_unbounded=True)
    assert (config.name, config.parameters, config.allow_unbounded) == (name, own, True)
    assert set(PARAMETERS[name]) <= set(PolicyLossConfig.__struct_fields__)


def test_a_parameter_left_out_is_the_loss_own_default_and_one_that_is_set_counts() -> None:
    assert PolicyLossConfig(name="gspo").parameters == GspoLossConfig(clip_low=3e-4, clip_high=4e-4)
    assert PolicyLossConfig(name="gspo", clip_low=0.1).parameters == GspoLossConfig(clip_low=0.1)
    batch = batch_of((1.5,), (1.0,))
    assert policy_loss(PolicyLossConfig(clip_high=0.4))(batch)[0].item() == pytest.approx(-1.4)


def test_an_unknown_loss_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(
        ConfigError, match=r"PolicyLossConfig.name 'gpso' is unknown; did you mean 'gspo'\?"
    ):
        PolicyLossConfig(name="gpso")


def test_a_parameter_that_a_loss_does_not_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="policy loss 'gspo' has no dual_clip; it has: clip_low, clip_high"
    ):
        PolicyLossConfig(name="gspo", dual_clip=3.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.5}, "PpoLossConfig.clip_low is 1.5, expected at least 0 and at most 1"),
        (
            {"name": "icepop", "weight_low": 6.0},
            "weight_high is 5.0, expected at least weight_low = 6.0",
        ),
        (
            {"name": "icepop", "weight_high": float("nan")},
            "weight_high is nan, expected at least 0",
        ),
        (
            {"name": "clip_cov", "covariance_low": 9.0},
            "covariance_high is 5.0, expected at least covariance_low = 9.0",
        ),
        (
            {"name": "decoupled_ppo", "correction": CorrectionConfig(truncate="token")},
            "correction is active with decoupled_ppo, expected one of them",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyLossConfig(**fields)


def test_a_loss_of_ones_own_is_named_by_module_and_function_and_takes_the_parameters_that_are_set() -> (
    None
):
    batch = batch_of((2.0,), (1.0,))
    own = policy_loss(PolicyLossConfig(name=f"{__name__}:scaled_policy_gradient", clip_high=3.0))
    torch.testing.assert_close(gradient(own, batch), row(-3.0))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (f"{__name__}:scaled_policy_gradent", {}, "did you mean 'scaled_policy_gradient'"),
        ("no_such_module:loss", {}, "module 'no_such_module' cannot be found"),
        (
            f"{__name__}:scaled_policy_gradient",
            {"drift_coef": 0.1},
            "has no keyword argument 'drift_coef'",
        ),
    ],
)
def test_a_loss_of_ones_own_that_is_not_there_is_refused(name, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_loss(PolicyLossConfig(name=name, **changes))


def test_a_loss_without_a_trust_region_needs_fresh_data_or_an_explicit_word() -> None:
    plain = PolicyLossConfig(name="gpg")
    assert safe_policy_loss(plain, max_staleness=0) is plain
    with pytest.raises(
        ConfigError, match=r"'gpg' has no trust region, expected one if max_staleness = 2 > 0"
    ):
        safe_policy_loss(plain, max_staleness=2)
    with pytest.raises(
        ConfigError,
        match=r"'gpg' has no trust region, expected one if an update has several optimizer",
    ):
        safe_policy_loss(plain, max_staleness=0, steps_once_per_update=False)
    insisting = PolicyLossConfig(name="gpg", allow_unbounded=True)
    assert safe_policy_loss(insisting, max_staleness=2, steps_once_per_update=False) is insisting


def test_the_penalty_for_samples_of_older_weights_is_weighted_by_the_ratio() -> None:
    batch = TokenBatch(
        log_prob=torch.log(torch.tensor([[0.6]])),
        behavior_log_prob=torch.log(torch.tensor([[0.3]])),
        advantage=torch.tensor([[0.0]]),
        mask=torch.tensor([[True]]),
        reference_log_prob=torch.log(torch.tensor([[0.6 * math.e]])),
    )
    # rho = 2 and d = 1: 2 * (e - 1 - 1), where k3 alone is e - 2
    for estimator, expected in (
        ("k3", math.e - 2.0),
        ("importance_weighted_k3", 2.0 * (math.e - 2.0)),
    ):
        losses, _ = policy_loss(PolicyLossConfig(kl=KlLossConfig(coef=1.0, estimator=estimator)))(
            batch
        )
        assert losses.item() == pytest.approx(expected, rel=1e-5)


def test_the_default_loss_has_a_trust_region_at_any_staleness() -> None:
    config = safe_policy_loss(PolicyLossConfig(), max_staleness=8)
    distant = batch_of((50.0, 0.001), (1.0, -1.0))
    assert not gradient(policy_loss(config), distant).any()


def test_what_a_loss_needs_is_known_before_anything_is_computed() -> None:
    assert not PolicyLossConfig().needs_proximal
    assert not PolicyLossConfig().needs_reference
    assert not PolicyLossConfig().needs_sequence_log_ratio
    assert PolicyLossConfig(name="decoupled_ppo").needs_proximal
    assert PolicyLossConfig(correction=CorrectionConfig(mask="token")).needs_proximal
    assert PolicyLossConfig(kl=KlLossConfig(coef=0.1)).needs_reference
    assert PolicyLossConfig(name="gspo").needs_sequence_log_ratio
    assert PolicyLossConfig(level="sequence").needs_sequence_log_ratio


def test_the_reference_penalty_is_added_to_every_unmasked_token() -> None:
    # d = log 2: value of k3 = 2 - 1 - log 2, gradient of k2 = -d
    config = PolicyLossConfig(name="gpg", kl=KlLossConfig(coef=0.5))
    mask = torch.tensor([[True, False]])
    batch = batch_of((1.0, 1.0), (0.0, 0.0), reference_log_prob=ratios_of(2.0, 2.0), mask=mask)
    losses, diagnostics = policy_loss(config)(batch)
    torch.testing.assert_close(losses, row(0.5 * 0.3068528194400547, 0.0))
    torch.testing.assert_close(
        gradient(policy_loss(config), batch), row(-0.5 * 0.6931471805599453, 0.0)
    )
    assert diagnostics.metrics()["reference_kl"] == pytest.approx(0.30685282)


def test_a_reference_penalty_without_a_reference_says_so_and_without_a_weight_needs_none() -> None:
    batch = random_batch(reference_log_prob=None)
    policy_loss(PolicyLossConfig())(batch)
    with pytest.raises(
        ValueError, match=r"PolicyLossConfig.kl needs TokenBatch.reference_log_prob, but it is None"
    ):
        policy_loss(PolicyLossConfig(kl=KlLossConfig(coef=0.1)))(batch)


def test_a_config_goes_through_json_and_back() -> None:
    config = PolicyLossConfig(
        name="cispo", clip_high=3.0, correction=CorrectionConfig(truncate="token")
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=PolicyLossConfig) == config


def test_configs_and_advantages_bring_no_torch() -> None:
    code = (
        "import sys, vla_rl.algorithms as a; a.PolicyLossConfig(), a.AdvantageConfig(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_everything_in_the_shop_windows_is_there() -> None:
    import vla_rl.algorithms
    import vla_rl.algorithms.losses

    for module in (vla_rl.algorithms, vla_rl.algorithms.losses):
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing
