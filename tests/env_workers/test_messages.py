"""What goes to another process arrives as it was, observations as one block; what cannot go is named before it
leaves.

Plain values, spaces, attributes, wrappers, actions.
"""

import datetime
import functools
import gc
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

import vla_rl.envs  # noqa: F401 - registers the environments
from vla_rl.env_workers.make_env import (
    get_wrapper_classes,
    needs_every_step,
    wrap_env,
    wrapper_spec,
)
from vla_rl.env_workers.packing import (
    NUM_BATCHES,
    ActionGate,
    BlockPacker,
    ObservationLayout,
    RowPacker,
)
from vla_rl.env_workers.spaces import (
    as_plain,
    build_space,
    call_method,
    describe_space,
    find_out_of_range,
    mark,
    observation_check,
    unmark,
)
from vla_rl.env_workers.vector_rows import SharedBatch
from vla_rl.errors import EnvError
from vla_rl.types import WrapperSpec


def test_scalars_of_numpy_become_pythons_own_at_any_depth() -> None:
    plain = as_plain({"a": [np.float32(0.5), (np.int64(3), None)], 1: np.bool_(True)}, "info")
    assert plain == {"a": [0.5, (3, None)], 1: True}
    assert type(plain["a"][0]) is float
    assert type(plain["a"][1][0]) is int
    assert type(plain[1]) is bool


def test_an_array_of_numbers_stays_the_same_array() -> None:
    array = np.zeros(3, np.float32)
    assert as_plain({"a": array}, "info")["a"] is array


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [datetime.date(2020, 1, 1)]}, r"info\['a'\]\[0\] is a date, expected numbers"),
        ({"a": {None: 1}}, r"info\['a'\] has the key None of NoneType, expected str or int"),
        ({"a": np.array(["x"])}, r"info\['a'\] is an array of <U1, expected numbers"),
        ({1, 2}, "info is a set"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_plain(value, "info")


def sent(value: list[Any]) -> list[Any]:
    """What a message makes of a marked value without arrays."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=list[Any])


@pytest.mark.parametrize(
    "value", [3, "x", None, (1, (2.5, "y")), [1, (2,)], {"a": (1, [2]), "b": {}}, np.float32(0.5)]
)
def test_a_value_is_the_same_after_a_message_with_its_tuples(value: Any) -> None:
    assert unmark(sent(mark(value, "value"))) == value


def test_a_space_is_the_same_after_a_message() -> None:
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    assert unmark(mark((space, 1), "spaces")) == (space, 1)


class Lamp(gymnasium.Env[int, int]):
    """An environment with an attribute and a method."""

    colour = ("red", "green")

    def shade(self, name: str, by: float = 0.5) -> tuple[str, float]:
        return name, by


def test_a_method_is_called_and_an_attribute_is_read() -> None:
    lamp = gymnasium.wrappers.TimeLimit(Lamp(), 3)
    assert unmark(call_method(lamp, "colour", [], {})) == ("red", "green")
    assert unmark(call_method(lamp, "shade", ["red"], {"by": 0.25})) == ("red", 0.25)
    with pytest.raises(AttributeError, match="size"):
        call_method(lamp, "size", [], {})


EVERY_SPACE = [
    spaces.Box(-1.0, 1.0, (7,), np.float32),
    spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiBinary((2, 3)),
    spaces.Text(max_length=9, min_length=0, charset="abc "),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 1, (2,), np.float32)})]),
]


@pytest.mark.parametrize("space", EVERY_SPACE, ids=lambda space: type(space).__name__)
def test_a_space_survives_the_journey_as_plain_values(space: spaces.Space[Any]) -> None:
    assert build_space(describe_space(space)) == space


def test_a_space_without_a_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="is a Sequence, expected a Box"):
        describe_space(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize("space", EVERY_SPACE, ids=lambda space: type(space).__name__)
def test_every_sample_of_a_space_passes_its_check(space: spaces.Space[Any]) -> None:
    space.seed(0)
    check = observation_check(space)
    for _ in range(10):
        sample = space.sample()
        assert check(sample) is None
        assert find_out_of_range(space, sample) is None


OBSERVATION = spaces.Dict(
    {"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "word": spaces.Text(5)}
)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            {"image": np.zeros((4, 5, 3), np.uint8), "word": "a"},
            "image is uint8 [4, 5, 3], expected uint8 [4, 4, 3]",
        ),
        (
            {"image": np.zeros((4, 4, 3), int), "word": "a"},
            "image is int64 [4, 4, 3], expected uint8 [4, 4, 3]",
        ),
        ({"image": [[0]], "word": "a"}, "image is list [[0]], expected uint8 [4, 4, 3]"),
        (
            {"image": np.zeros((4, 4, 3), np.uint8)},
            "observation is a dict with the keys ['image'], expected a dict",
        ),
        (
            {"image": np.zeros((4, 4, 3), np.uint8), "word": "too long"},
            "word is str 'too long', expected a value of",
        ),
        (None, "observation is NoneType None, expected a dict with the keys ['image', 'word']"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(value: Any, problem: str) -> None:
    found = observation_check(OBSERVATION)(value)
    assert found is not None
    assert found.startswith(problem)


def test_numbers_out_of_range_are_found_where_they_are() -> None:
    space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    value = {"state": np.array([0.0, 2.0], np.float32)}
    assert observation_check(space)(value) is None
    assert (
        find_out_of_range(space, value)
        == f"state is float32 [2] with values outside {space['state']}"
    )


TIME_LIMIT = "gymnasium.wrappers.common:TimeLimit"


def test_a_class_or_a_partial_of_one_is_named_with_its_arguments() -> None:
    assert wrapper_spec(TimeLimit) == WrapperSpec(path=TIME_LIMIT)
    limited = wrapper_spec(functools.partial(TimeLimit, max_episode_steps=3))
    assert limited == WrapperSpec(path=TIME_LIMIT, kwargs={"max_episode_steps": 3})
    assert wrapper_spec(limited) is limited


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (lambda env: env, "cannot be found by another process"),
        (functools.partial(TimeLimit, max_episode_steps={1}), "max_episode_steps is a set"),
        (functools.partial(TimeLimit, 3), "positional arguments, expected keywords only"),
    ],
)
def test_what_cannot_be_sent_is_refused(wrapper: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        wrapper_spec(wrapper)


def test_wrappers_are_applied_from_the_inside_outwards() -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    statistics = wrapper_spec(RecordEpisodeStatistics)
    env = wrap_env(
        bare, [WrapperSpec(path=TIME_LIMIT, kwargs={"max_episode_steps": 3}), statistics]
    )
    assert isinstance(env, RecordEpisodeStatistics)
    assert isinstance(env.env, TimeLimit)
    assert env.env.env is bare
    assert {statistics.path, TIME_LIMIT} <= get_wrapper_classes(env)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gymnasium.wrappers:Nothing", "has no class 'Nothing'"),
        ("nowhere:Wrapper", "module 'nowhere' cannot be found"),
        ("gymnasium", "expected 'module:name'"),
    ],
)
def test_a_wrapper_that_is_not_there_is_named(path: str, said: str) -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    with pytest.raises(EnvError, match=f"the wrapper '{path}'.*({said})"):
        wrap_env(bare, [WrapperSpec(path=path)])


def test_checks_of_gymnasium_need_no_image_of_every_step_and_a_time_limit_may() -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    assert not needs_every_step(OrderEnforcing(bare))
    assert needs_every_step(OrderEnforcing(TimeLimit(bare, 3)))


def test_a_wrapper_class_may_say_that_it_reads_no_images() -> None:
    class Silent(gymnasium.Wrapper[Any, Any, Any, Any]):
        reads_images = False

    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    assert not needs_every_step(Silent(bare))
    assert needs_every_step(Silent(TimeLimit(bare, 3)))


ARM = ActionGate(spaces.Box(-1.0, 1.0, (3,), np.float32), "arm-v0")


def test_what_can_be_cast_is_cast() -> None:
    for action in ([0, 1, -1], np.zeros(3, np.float64), (0.5, 0.5, 0.5)):
        assert ARM.check_action(action).dtype == np.float32
    assert ARM.check_chunk(np.zeros((4, 3))).shape == (4, 3)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (np.zeros(4, np.float32), r"action for arm-v0 is float32 \[4\], expected float32 \[3\]"),
        (np.zeros((1, 3), np.float32), r"is float32 \[1, 3\], expected float32 \[3\]"),
        (np.zeros(3, np.complex64), r"is complex64 \[3\], expected float32 \[3\]"),
        (["a", "b", "c"], r"is <U1 \[3\], expected float32 \[3\]"),
        ([0.0, 1.5, 0.0], r"holds 1.5 at \[1\], expected -1.0 to 1.0; 1 of 3"),
        (
            [np.nan, 0.0, np.inf],
            r"holds nan at \[0\].*2 of 3 numbers are out of range or not finite",
        ),
    ],
)
def test_a_wrong_action_says_what_it_is_and_what_was_expected(action: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ARM.check_action(action)


@pytest.mark.parametrize("shape", [(3,), (0, 3), (8, 4), (2, 2, 3)])
def test_a_chunk_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="action chunk for arm-v0 is float64"):
        ARM.check_chunk(np.zeros(shape))


def test_a_wrong_number_in_a_chunk_is_found() -> None:
    chunk = np.zeros((8, 3), np.float32)
    chunk[5, 2] = -7
    with pytest.raises(ValueError, match=r"holds -7.0 at \[5, 2\], expected -1.0 to 1.0; 1 of 24"):
        ARM.check_chunk(chunk)


def test_discrete_actions_are_whole_numbers_in_range() -> None:
    gate = ActionGate(spaces.Discrete(3), "keys-v0")
    assert gate.check_action(np.int64(2)) == 2
    for action in (3, -1, 1.0, [1]):
        with pytest.raises(ValueError, match="action for keys-v0 is"):
            gate.check_action(action)
    with pytest.raises(ValueError, match="action chunks need a Box space"):
        gate.check_chunk(np.zeros((2, 1)))


def test_any_other_space_is_asked_itself() -> None:
    gate = ActionGate(spaces.MultiDiscrete([2, 3]), "pad-v0")
    assert gate.check_action([1, 2]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="expected a value of MultiDiscrete"):
        gate.check_action([1, 3])


CAMERAS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
        "state": spaces.Box(-1.0, 1.0, (8,), np.float32),
        "instruction": spaces.Text(40),
    }
)

NESTED = spaces.Tuple(
    (
        spaces.Discrete(5),
        spaces.Dict(
            {
                "a": spaces.MultiBinary(3),
                "b": spaces.Tuple((spaces.Box(-1, 1, (), np.float64), spaces.Text(9))),
            }
        ),
    )
)


def read_back(layout: ObservationLayout, observation: Any) -> Any:
    block, others = BlockPacker(layout).pack(observation)
    array: Any = block
    return layout.unpack_observation(
        array.array, others
    )  # a plain block: this process has no shared memory


@pytest.mark.parametrize(
    "space", [CAMERAS, NESTED, spaces.Box(-1, 1, (2, 3), np.float32), spaces.Text(5)]
)
def test_what_is_taken_apart_comes_back_equal_and_in_its_space(space: spaces.Space[Any]) -> None:
    space.seed(3)
    for _ in range(5):
        observation = space.sample()
        found = read_back(ObservationLayout(space), observation)
        assert space.contains(found)
        assert spell_out(found) == spell_out(observation)


def spell_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: spell_out(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(spell_out(part) for part in value)
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def test_large_arrays_are_views_of_the_block_and_small_ones_are_copies() -> None:
    layout = ObservationLayout(CAMERAS)
    block = np.zeros(layout.num_bytes, np.uint8)
    observation = layout.unpack_observation(block, ["text"])
    layout.pack_observation(
        {
            "image": np.ones((40, 40, 3), np.uint8),
            "state": np.ones(8, np.float32),
            "instruction": "x",
        },
        layout.get_arrays(block),
    )
    assert observation["image"].all()
    assert not observation["state"].any()
    # 40 * 40 * 3, a multiple of 64, and 8 floats in a line of their own
    assert layout.num_bytes == 4800 + 64


def test_rows_of_a_shared_batch_are_written_by_their_simulators() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    rows = [RowPacker(layout, batch.path, index, 2) for index in range(2)]
    batch.close()
    for index, row in enumerate(rows):
        state = np.full(8, index + 1, np.float32)
        block, others = row.pack(
            {
                "image": np.full((40, 40, 3), index, np.uint8),
                "state": state,
                "instruction": f"{index}",
            }
        )
        assert block is None
        batch.store_others(index, others)
    together = batch.get()
    assert together["state"].tolist() == [[1.0] * 8, [2.0] * 8]
    assert together["image"].shape == (2, 40, 40, 3)
    assert together["instruction"] == ("0", "1")
    assert batch.copy_row(1)["image"].tolist() == np.ones((40, 40, 3)).tolist()


def test_a_copy_stays_as_it_is_and_its_memory_is_used_again_when_it_is_gone() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    writer = RowPacker(layout, batch.path, 0, 2)
    batch.close()
    still: dict[str, Any] = {
        "image": np.zeros((40, 40, 3), np.uint8),
        "state": np.zeros(8, np.float32),
        "instruction": "",
    }
    batch.start_batch()
    writer.pack(still, batch.current)
    kept = batch.detach()["image"]
    address = kept.ctypes.data
    batch.start_batch()
    writer.pack({**still, "image": np.ones((40, 40, 3), np.uint8)}, batch.current)
    later = batch.detach()
    assert not kept[0].any()
    assert later["image"][0].all()
    assert later["image"].ctypes.data != address
    del kept
    gc.collect()
    batch.start_batch()
    writer.pack(still, batch.current)
    assert batch.detach()["image"].ctypes.data == address


def test_a_batch_is_copied_where_its_receiver_keeps_all_of_them() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 1)
    writer = RowPacker(layout, batch.path, 0, 1)
    batch.close()
    kept = []
    for number in range(3 * NUM_BATCHES):
        batch.start_batch()
        state = np.full(8, number, np.float32)
        writer.pack(
            {"image": np.zeros((40, 40, 3), np.uint8), "state": state, "instruction": ""},
            batch.current,
        )
        kept.append(batch.detach()["state"])
    assert [state[0, 0] for state in kept] == [*range(3 * NUM_BATCHES)]


def test_rows_that_are_not_written_are_those_of_the_batch_given_last() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    rows = [RowPacker(layout, batch.path, index, 2) for index in range(2)]
    batch.close()

    def write(index: int, number: float) -> None:
        state = np.full(8, number, np.float32)
        rows[index].pack(
            {"image": np.zeros((40, 40, 3), np.uint8), "state": state, "instruction": ""},
            batch.current,
        )

    for first in (1.0, 3.0):
        batch.start_batch()
        write(0, first)
        write(1, first + 1)
        whole = batch.detach()["state"]
        assert whole[:, 0].tolist() == [first, first + 1]
    batch.start_batch()
    write(0, 9.0)  # of a step that failed, and is never given
    batch.keep_other_rows()
    write(1, 5.0)
    assert batch.detach()["state"][:, 0].tolist() == [3.0, 5.0]
