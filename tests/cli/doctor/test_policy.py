"""Checkpoints that cannot act are named: each test makes one fault happen."""

from pathlib import Path

import msgspec
import numpy as np
from faults import words

from vla_rl.cli.doctor import Patient
from vla_rl.cli.doctor.policy import checkpoint_that_acts, entropy_share
from vla_rl.models.loading import BASE_POLICY
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import tiny


def test_a_head_that_was_never_trained_for_tokens_is_named(tmp_path: Path) -> None:
    untrained = OpenVlaOft.create(tiny(), seed=0)
    untrained.save(tmp_path / "new")
    found = words(checkpoint_that_acts(Patient(checkpoint=str(tmp_path / "new"))))
    assert "almost at random" in found
    assert "token RL on it scores 0 %" in found


def test_the_shipped_policy_is_in_order() -> None:
    assert not words(checkpoint_that_acts(Patient(checkpoint=str(BASE_POLICY))))
    assert entropy_share(OpenVlaOft.load(BASE_POLICY)) < 0.7


def test_a_folder_trained_for_numbers_that_is_read_as_tokens_is_named(policy_copy: Path) -> None:
    (policy_copy / "action_head--50000_checkpoint.pt").write_bytes(b"weights of an L1 head")
    patient = Patient(checkpoint=str(policy_copy), policy_family="openvla_oft")
    found = words(checkpoint_that_acts(patient))
    assert "action_head--50000_checkpoint.pt lies beside it" in found
    assert "--policy-family continuous" in found


def test_statistics_of_another_robot_are_named(policy_copy: Path) -> None:
    config = msgspec.json.decode((policy_copy / "config.json").read_bytes())
    action = config["norm_stats"]["default"]["action"]
    for end in ("q01", "q99"):
        action[end] = (np.array(action[end]) * 0.03).tolist()
    (policy_copy / "config.json").write_bytes(msgspec.json.encode(config))
    found = words(checkpoint_that_acts(Patient(checkpoint=str(policy_copy))))
    assert "scale displacements to at most 0.030" in found


def test_statistics_that_are_asked_for_and_missing_are_named(policy_copy: Path) -> None:
    patient = Patient(checkpoint=str(policy_copy), norm_key="libero_goal")
    found = words(checkpoint_that_acts(patient))
    assert "no 'libero_goal'" in found
    assert "--norm-key" in found
