"""Names that moved stay importable for one release, as the very same modules.

The public names come from `vla_rl`.
"""

import importlib
import runpy
import subprocess
import sys

import pytest

import vla_rl
from vla_rl.graph.spans import CriticalPath
from vla_rl.renamed import RENAMED, new_name_of


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_gives_the_module_of_the_new_one(old: str) -> None:
    sys.modules.pop(f"vla_rl.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"vla_rl.{old} is vla_rl.{RENAMED[old]} now"):
        module = importlib.import_module(f"vla_rl.{old}")
    assert module is importlib.import_module(f"vla_rl.{RENAMED[old]}")
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == f"vla_rl.{RENAMED[old]}"


def test_what_is_below_a_package_that_moved_is_found_too() -> None:
    assert new_name_of("vla_rl.recipes.nodes.rewards") == "vla_rl.nodes.rewards"
    assert new_name_of("vla_rl.recipes.srpo_libero") is None
    assert new_name_of("json.recipes.nodes") is None
    for name in [name for name in sys.modules if name.startswith("vla_rl.recipes.nodes")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match="vla_rl.recipes.nodes is vla_rl.nodes now"):
        old = importlib.import_module("vla_rl.recipes.nodes.rewards")
    assert old is importlib.import_module("vla_rl.nodes.rewards")


def test_learners_are_still_given_by_the_room_of_engines() -> None:
    from vla_rl import engines, learning

    with pytest.warns(
        DeprecationWarning, match=r"vla_rl\.engines\.Learner is vla_rl\.learning\.Learner now"
    ):
        assert engines.Learner is learning.Learner  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="Lerner"):
        engines.Lerner  # type: ignore[attr-defined]  # noqa: B018


def test_actor_methods_are_still_marked_by_their_old_name() -> None:
    from vla_rl import actors

    with pytest.warns(
        DeprecationWarning, match=r"actors\.endpoint is vla_rl\.actors\.actor_method"
    ):
        assert actors.endpoint is actors.actor_method  # type: ignore[attr-defined]


def test_the_two_kinds_of_engine_are_still_given_by_their_old_names() -> None:
    from vla_rl import rollout

    with pytest.warns(
        DeprecationWarning, match=r"PolicyEngine is vla_rl\.rollout\.ActionEngine now"
    ):
        assert rollout.PolicyEngine is rollout.ActionEngine  # type: ignore[attr-defined]
    with pytest.warns(
        DeprecationWarning, match=r"LanguageEngine is vla_rl\.rollout\.ChatEngine now"
    ):
        assert rollout.LanguageEngine is rollout.ChatEngine  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="ChatEngines"):
        rollout.ChatEngines  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("vla_rl.algorithms", "policy_loss_for", "safe_policy_loss"),
        ("vla_rl.algorithms.losses", "policy_loss_for", "safe_policy_loss"),
        ("vla_rl.evaluation", "numbers_in", "parse_numbers"),
        ("vla_rl.evaluation", "tasks_in", "parse_tasks"),
        ("vla_rl.models.loading", "device_for", "choose_device"),
    ],
)
def test_functions_are_still_given_by_their_old_names(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is {module}.{new} now"):
        assert getattr(home, old) is getattr(home, new)


def test_the_bottleneck_of_an_update_is_still_given_by_its_old_name() -> None:
    path = CriticalPath(update=1, duration_s=0.0, segments=())
    with pytest.warns(DeprecationWarning, match=r"CriticalPath\.bound_by is CriticalPath\.bottle"):
        assert path.bound_by == path.bottleneck == ""


def test_the_old_command_of_the_report_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "nowhere"])
    monkeypatch.delitem(sys.modules, "vla_rl.recipes.report", raising=False)
    with (
        pytest.warns(DeprecationWarning, match="commands.report"),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(
            "vla_rl.recipes.report", run_name="__main__", alter_sys=True
        )  # as `-m` does
    assert ended.value.code == 2
    assert "nowhere has no config.json" in capsys.readouterr().err


def test_every_public_name_is_there_and_importing_the_package_brings_no_torch() -> None:
    for name in vla_rl.__all__:
        assert getattr(vla_rl, name) is not None, name
    assert set(vla_rl.__all__) <= set(dir(vla_rl))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        vla_rl.Trainer  # type: ignore[attr-defined]  # noqa: B018
    probe = (
        "import sys, vla_rl; print([m for m in ('torch', 'numpy', 'gymnasium', 'zmq') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
