"""Two loops that differ in one stage: the comparison of their traces names that stage, with both values."""

import io
import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS
from PIL import Image
from small_flow import run_episodes, tiny_policy

from vla_rl.engines import DeviceLane
from vla_rl.errors import DataError
from vla_rl.evaluation.parity import Trace, TraceEntry, compare, read_trace, write_trace
from vla_rl.evaluation.parity.comparison import find_hint
from vla_rl.evaluation.parity.recording import record_trace
from vla_rl.models.images.pipeline import image_stages
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.action_tokens import ActionScaler
from vla_rl.models.prismatic.config import tiny
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

PAGE = Path(__file__).parents[3] / "docs" / "parity.md"


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    written = Trace(
        "mine",
        (
            TraceEntry(0, "instruction", "open it"),
            TraceEntry(0, "camera", images, "image"),
            TraceEntry(0, "tokens", np.array([5, 6])),
            TraceEntry(1, "success", True),
        ),
    )
    write_trace(tmp_path / "a.jsonl", written)
    read = read_trace(tmp_path / "a.jsonl")
    assert (read.source, len(read.entries)) == ("mine", 4)
    assert compare(written, read).difference is None
    found = read.entries[1].value
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (np.dtype(np.uint8), (2, 4, 3))


HEAD = '{"parity": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1 is not JSON"),
        (
            '{"parity": 1, "source": null}\n{"decision": 0, "boundary": "tokens", "value": [1]}\n',
            "source of .*:1 is None, a NoneType, expected a text",
        ),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "key": ["a"], "value": [1]}\n',
            r"key of .*:2 is \['a'\], a list, expected a text",
        ),
        ('{"parity": 2}\n', ":1 is not the head of a trace"),
        (HEAD, "holds no values"),
        (HEAD + "[1]\n", ":2 is a list, expected a JSON object"),
        (HEAD + '{"decision": 0, "boundary": "camera"}\n', ":2 has the fields"),
        (HEAD + '{"decision": 0, "boundary": "wheel", "value": 1}\n', "'wheel', expected one of"),
        (HEAD + '{"decision": -1, "boundary": "tokens", "value": [1]}\n', "decision is -1"),
        (HEAD + '{"decision": true, "boundary": "tokens", "value": [1]}\n', "decision is True"),
        (HEAD + '{"decision": 0, "boundary": "tokens", "value": [[1], 2]}\n', "cannot be read"),
        (HEAD + '{"decision": 0, "boundary": "tokens", "value": [null]}\n', "expected numbers"),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "value": {"dtype": "object",'
            ' "shape": [1], "base64": "AA=="}}\n',
            "dtype is 'object'",
        ),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "value": {"dtype": "uint8",'
            ' "shape": [2], "base64": "AA=="}}\n',
            "cannot be read",
        ),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_trace(path)


def test_the_page_shows_how_a_loop_writes_a_trace(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    read = read_trace(tmp_path / "theirs.jsonl")
    assert [entry.boundary for entry in read.entries] == [
        "instruction",
        "camera",
        "tokens",
        "success",
    ]


@pytest.fixture(scope="module")
def policy() -> OpenVlaOft:
    config = msgspec.structs.replace(
        tiny(image_size=28, cameras=("image",), chunk_size=4),
        images="exact",
        action_bounds=LIBERO_BOUNDS["libero_goal"],
    )
    return OpenVlaOft.create(config, seed=0)


def frame(seed: int) -> np.ndarray:
    """A smooth image, as a camera gives: JPEG's decoders differ little on it."""
    rows, columns = np.mgrid[0:64, 0:64] / 64.0
    waves = [np.sin(3 * rows + seed + k) * np.cos(4 * columns - k) for k in range(3)]
    return np.uint8(127 + 100 * np.stack(waves, axis=-1))


@pytest.fixture(scope="module")
def ours(policy: OpenVlaOft) -> Trace:
    steps = []
    for decision in range(2):
        seen = {
            "image": frame(decision),
            "state": np.array([0.1, 0.2, 1.0, 3.0, 0.2, 0.1, 0.04, -0.04], np.float32),
            "instruction": "open the drawer",
        }
        with torch.inference_mode():
            sampled = policy.sample(policy.prepare([seen]), [Sampling(seed=decision)])
            tokens, log_probs = sampled.tokens, sampled.log_probs
        chunk = ActionChunk(
            actions=policy.decode(tokens.numpy())[0],
            tokens=tokens[0].numpy(),
            log_probs=log_probs[0].numpy(),
            weight_version=0,
        )
        rewards = np.zeros(4 if decision == 0 else 3, np.float32)
        steps.append(Step(observation=seen, chunk=chunk, rewards=rewards))
    episode = EpisodeSpec(
        episode_id=0,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    trajectory = Trajectory(
        episode=episode,
        steps=tuple(steps),
        final_observation={},
        stop_reason=StopReason.SUCCESS,
        info={},
    )
    return record_trace(trajectory, policy, "ours")


def theirs(ours: Trace, **stages: object) -> Trace:
    """The same loop with some stages exchanged: a function of the stage's value each."""
    entries = [
        msgspec.structs.replace(entry, value=stages[entry.boundary](entry.value))
        if entry.boundary in stages
        else entry
        for entry in ours.entries
    ]
    return Trace("theirs", tuple(entries))


def test_a_loop_equals_itself(ours: Trace) -> None:
    comparison = compare(ours, ours)
    assert comparison.difference is None
    assert comparison.num_decisions == 2
    assert comparison.compared["camera"] == 2
    assert comparison.compared["success"] == 1


async def test_a_policy_that_tells_nothing_of_its_stages_records_what_the_simulator_gave_and_got() -> (
    None
):
    policy = tiny_policy(noise_level=0.3)
    async with DeviceLane(num_threads=1) as lane:
        trajectory, *_ = await run_episodes(policy, lane)
    flow = record_trace(trajectory, policy, "flow")
    assert {entry.boundary for entry in flow.entries} == {
        *("instruction", "camera", "orientation", "state", "tokens", "executed_action", "success")
    }
    comparison = compare(flow, theirs(flow, executed_action=lambda actions: actions + 1.0))
    assert comparison.difference is not None
    assert comparison.difference.boundary.name == "executed_action"
    assert comparison.compared["camera"] == 2


def test_a_flipped_image_is_found_at_the_orientation(ours: Trace) -> None:
    difference = compare(ours, theirs(ours, orientation=lambda image: image[::-1])).difference
    assert difference is not None
    assert (difference.boundary.name, difference.decision, difference.key) == (
        "orientation",
        0,
        "image",
    )
    assert difference.hint == "the second image is the first one upside down"


def test_another_jpeg_decoder_is_found_at_the_jpeg_and_not_at_the_resize(
    ours: Trace, policy: OpenVlaOft
) -> None:
    originals = {e.decision: e.value for e in ours.entries if e.boundary == "orientation"}

    def by_pillow(image: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95, subsampling=2)
        return np.asarray(Image.open(file))

    entries = []
    for entry in ours.entries:
        if entry.boundary in ("jpeg", "resize", "crop"):
            images = by_pillow(originals[entry.decision])
            tensor = torch.from_numpy(images.copy()).permute(2, 0, 1)[None]
            for name, stage in image_stages("exact").items():
                if name != "jpeg":
                    tensor = stage(tensor, policy.config.image_size)
                if name == entry.boundary:
                    break
            entry = msgspec.structs.replace(entry, value=tensor[0].permute(1, 2, 0).numpy())
        entries.append(entry)
    difference = compare(ours, Trace("theirs", tuple(entries))).difference
    assert difference is not None
    assert difference.boundary.name == "jpeg"
    assert "another JPEG decoder" in difference.boundary.suspects
    assert difference.hint is not None
    assert "codecs" in difference.hint


def test_the_sign_of_a_quaternion_is_found_at_the_state(ours: Trace) -> None:
    def with_other_sign(state: np.ndarray) -> np.ndarray:
        angle = float(np.linalg.norm(state[3:6]))
        axis = state[3:6] / angle
        quaternion = -np.array([*(axis * math.sin(angle / 2)), math.cos(angle / 2)])
        other = 2 * math.acos(quaternion[3])
        turned = quaternion[:3] / math.sqrt(1 - quaternion[3] ** 2) * other
        return np.concatenate([state[:3], turned, state[6:]]).astype(np.float32)

    difference = compare(ours, theirs(ours, state=with_other_sign)).difference
    assert difference is not None
    assert difference.boundary.name == "state"
    assert difference.hint is not None
    assert "opposite signs" in difference.hint


def test_the_grippers_sign_is_found_at_the_executed_action(ours: Trace) -> None:
    def opened(actions: np.ndarray) -> np.ndarray:
        return actions * np.array([1, 1, 1, 1, 1, 1, -1], np.float32)

    difference = compare(ours, theirs(ours, executed_action=opened)).difference
    assert difference is not None
    assert difference.boundary.name == "executed_action"
    assert difference.hint == (
        "only the gripper differs, by its sign: one opens where the other closes"
    )


def test_wrong_statistics_are_found_at_the_action(ours: Trace) -> None:
    units = {e.decision: e.value for e in ours.entries if e.boundary == "unit_action"}
    other = ActionScaler(LIBERO_BOUNDS["libero_spatial"])
    entries = tuple(
        msgspec.structs.replace(entry, value=other.unscaled(units[entry.decision]))
        if entry.boundary == "action"
        else entry
        for entry in ours.entries
    )
    difference = compare(ours, Trace("theirs", entries)).difference
    assert difference is not None
    assert (difference.boundary.name, difference.decision) == ("action", 0)
    assert difference.hint == "each dimension is scaled and shifted, as by other statistics"


def test_differences_of_rounding_are_equal_and_reported(ours: Trace) -> None:
    rounded = theirs(ours, action=lambda actions: actions.astype(np.float32))
    comparison = compare(ours, rounded)
    assert comparison.difference is None
    assert 0.0 < comparison.largest["action"] < 1e-6


def test_a_boundary_that_one_loop_does_not_record_is_left_out(ours: Trace) -> None:
    entries = tuple(entry for entry in ours.entries if entry.boundary != "jpeg")
    comparison = compare(ours, Trace("theirs", entries))
    assert comparison.difference is None
    assert comparison.only_in_one == {"jpeg": 0}


def test_an_episode_that_ended_earlier_differs_where_the_other_goes_on(ours: Trace) -> None:
    entries = tuple(entry for entry in ours.entries if entry.decision == 0)
    difference = compare(ours, Trace("theirs", entries)).difference
    assert difference is not None
    assert (difference.decision, difference.values) == (1, ("recorded", "not recorded"))


def test_not_a_number_differs_from_every_number(ours: Trace) -> None:
    def broken(state: np.ndarray) -> np.ndarray:
        return np.where(np.arange(8) == 2, np.nan, state)

    difference = compare(ours, theirs(ours, state=broken)).difference
    assert difference is not None
    assert difference.boundary.name == "state"
    same = theirs(ours, state=broken)
    assert compare(same, same).difference is None


def test_traces_without_a_boundary_in_common_are_refused(ours: Trace) -> None:
    alone = Trace("theirs", (TraceEntry(0, "success", True),))
    entries = tuple(entry for entry in ours.entries if entry.boundary != "success")
    with pytest.raises(DataError, match="expected at least one boundary in both"):
        compare(Trace("ours", entries), alone)


IMAGE = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (IMAGE[::-1, ::-1], "turned by 180 degrees"),
        (IMAGE[::-1], "upside down"),
        (IMAGE[:, ::-1], "mirrored"),
        (np.rot90(IMAGE), "turned by 90 degrees"),
        (np.rot90(IMAGE, 3), "turned by 270 degrees"),
        (IMAGE[..., ::-1], "in BGR instead of RGB"),
    ],
)
def test_an_image_that_was_turned_is_named_by_its_turn(second: np.ndarray, words: str) -> None:
    assert find_hint("image", IMAGE, second) == f"the second image is the first one {words}"


def test_small_differences_all_over_are_those_of_two_codecs() -> None:
    near = np.clip(IMAGE.astype(int) + 3, 0, 255).astype(np.uint8)
    assert "two codecs" in (find_hint("image", IMAGE, near) or "")
    assert find_hint("image", IMAGE, 255 - IMAGE) is None
    assert find_hint("image", IMAGE, IMAGE[:3]) is None


def test_one_rotation_with_two_axes_is_named() -> None:
    # a turn by 3 about z is one by 2 pi - 3 about -z
    first = np.array([0.1, 0.2, 0.3, 0.0, 0.0, 3.0, 0.04, -0.04])
    second = first.copy()
    second[5] = 3.0 - 2 * np.pi
    assert "quaternions have opposite signs" in (find_hint("state", first, second) or "")
    second[0] += 0.1
    assert find_hint("state", first, second) is None


ACTIONS = np.array([[0.1, -0.2, 1.0], [0.3, 0.4, -1.0], [-0.5, 0.6, 1.0]])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (ACTIONS * [1, 1, -1], "only the gripper differs, by its sign"),
        (ACTIONS * [1, 1, 0.5], "only the gripper differs"),
        (ACTIONS * 2.0 + 0.5, "the second is the first times 2 plus 0.5"),
        (ACTIONS * [2.0, 3.0, 4.0] + [0.5, 0.0, 1.0], "each dimension is scaled and shifted"),
    ],
)
def test_actions_are_compared_by_gripper_scale_and_statistics(
    second: np.ndarray, words: str
) -> None:
    assert (find_hint("action", ACTIONS, second) or "").startswith(words)


def test_two_decisions_are_too_few_to_see_a_scale_in_each_dimension() -> None:
    # a line passes through any two points
    assert find_hint("action", ACTIONS[:2], np.array([[0.7, 0.1, 0.2], [-0.9, 0.8, 0.3]])) is None


def test_other_boundaries_and_shapes_have_no_hint() -> None:
    assert find_hint("log_probs", ACTIONS, ACTIONS * 2.0) is None
    assert find_hint("action", ACTIONS, ACTIONS[:2]) is None
