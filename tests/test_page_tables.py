"""Tables of pages say what is so: guarantees name their tests, commands take the families they list.

A short fault campaign keeps the promises of the page of guarantees.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pi_folders import write_openpi
from small_flow import tiny_policy
from small_policies import token_policy
from steered_bases import write_head
from tiny_smolvla import write_smolvla

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.learner.plan import get_tensor_plan
from vla_rl.models.families import require_method, require_token_means
from vla_rl.models.loading import CheckpointFormat, load_policy
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft.fine_tuning import tiny_policy as tiny_oft
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.steered.bases import freeze_base
from vla_rl.models.vllm import serve
from vla_rl.recipes import sft_libero
from vla_rl.recipes.sft_flow import require_flow
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.recipes.trainable_policy import add_adapters, choose_trained_part, require_trainable

ROOT = Path(__file__).parent.parent
GUARANTEES = ROOT / "docs" / "guarantees.md"
POLICIES = ROOT / "docs" / "policies.md"
NFT: Final = LearnerConfig(loss=PolicyLossConfig(name="nft"))


def test_every_test_that_the_page_of_guarantees_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", GUARANTEES.read_text())
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 60
    assert [name for name in named if name not in defined] == []


def test_every_promise_of_the_page_names_a_test() -> None:
    rows = [
        line
        for line in GUARANTEES.read_text().splitlines()
        if line.startswith("| ") and "held by" not in line
    ]
    assert [row for row in rows if "`test_" not in row.rsplit("|", 2)[1]] == []


@pytest.mark.parametrize(
    "kind",
    [
        "fuzzed_hosts",
        # run/test_nothing_is_lost.py kills and freezes the simulators of a shorter run
        pytest.param("killed_simulators", marks=pytest.mark.proof),
    ],
)
def test_a_short_campaign_of_faults_finds_nothing(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.faults",
            "--rounds",
            "1",
            "--seed",
            "7",
            "--kinds",
            kind,
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["by_kind"] == {kind: {"tries": 1, "failures": 0}}
    assert (figures["lost_episodes"], figures["lost_metric_lines"], figures["left_behind"]) == (
        0,
        0,
        0,
    )


def write_mlp(folder: Path) -> None:
    shape = MlpConfig(state_size=3, action_low=(-1.0,), action_high=(1.0,), num_bins=3)
    MlpPolicy.create(shape, seed=0).save(folder)


FAMILIES: Final[dict[str, Callable[[Path], Any]]] = {
    "OpenVLA": lambda folder: token_policy().save(folder),
    "OFT, tokens": lambda folder: tiny_oft("tokens", None, seed=0).save(folder),
    "OFT, L1": lambda folder: tiny_oft("l1", None, seed=0).save(folder),
    "OFT, diffusion": lambda folder: tiny_oft("diffusion", None, seed=0).save(folder),
    "MLP": write_mlp,
    "small flow": lambda folder: tiny_policy(noise_level=0.3).save(folder),
    "pi0, pi0.5": lambda folder: write_openpi(folder, "pi05"),
    "SmolVLA": write_smolvla,
    "head": write_head,
}

COMMANDS: Final[tuple[Callable[[Any, Path], object], ...]] = (
    # loaded, which is all that acting asks for
    lambda policy, folder: policy.describe(),
    lambda policy, folder: require_trainable(policy, str(folder), LearnerConfig()),
    lambda policy, folder: require_trainable(policy, str(folder), NFT),
    lambda policy, folder: add_adapters(policy, LoraConfig(rank=2), seed=0),
    lambda policy, folder: choose_trained_part(policy, "expert"),
    lambda policy, folder: (
        require_method(policy, "recompute_activations", "recompute_activations"),
        require_method(policy, "compile_blocks", "compile_blocks"),
    ),
    lambda policy, folder: get_tensor_plan(policy),
    lambda policy, folder: serve(policy),
    lambda policy, folder: require_token_means(policy, "by_mean"),
    lambda policy, folder: freeze_base(policy),
    lambda policy, folder: sft_libero.starting_policy(
        SftLiberoConfig(checkpoint=str(folder), device="cpu"), []
    ),
    lambda policy, folder: require_flow(folder),
)
"""What the commands of each row ask of a policy before they start, in the order of the table."""


def read_table() -> tuple[list[str], list[list[str]]]:
    """Return the families of the table, and its rows of command and cells."""
    section = POLICIES.read_text(encoding="utf-8").split("## Which command takes which family")[1]
    lines = re.findall(r"^\| (.*) \|$", section.split("\n## ")[0], re.MULTILINE)
    head, *rows = [line.split(" | ") for line in lines if not line.startswith("---")]
    return head[1:], rows


def test_the_table_has_a_row_for_each_command_and_a_column_for_each_family() -> None:
    families, rows = read_table()
    assert families == list(FAMILIES)
    assert len(rows) == len(COMMANDS)
    assert {cell for row in rows for cell in row[1:]} == {"yes", "no"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_command_takes_a_family_or_refuses_it_by_name(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    FAMILIES[family](folder)
    format = CheckpointFormat(noise_level=0.3) if family in ("pi0, pi0.5", "SmolVLA") else None
    policy: Any = load_policy(str(folder), format or CheckpointFormat(), "cpu")
    families, rows = read_table()
    column = families.index(family) + 1
    found, refusals = {}, []
    for (command, *_), ask in zip(rows, COMMANDS, strict=True):
        try:
            ask(policy.copy(), folder)
            found[command] = "yes"
        except ConfigError as error:
            found[command] = "no"
            refusals.append(str(error))
    assert found == {row[0]: row[column] for row in rows}
    names = (type(policy).__name__, "of the family", "of OpenVLA's families", f"{folder} has a ")
    assert [each for each in refusals if not any(name in each for name in names)] == []
