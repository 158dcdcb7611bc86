"""Each trained parameter has its places in shared memory, or the memory cannot be shared."""

from torch import Tensor, nn

from vla_rl.engines.weight_shards import find_trained_offsets


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    made[1].weight.requires_grad_(False)
    return made


def tensors_of(made: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in made.named_parameters()}


def test_only_trained_parameters_have_places() -> None:
    made = network()
    offsets = {"0.weight": 64, "1.weight": 128}
    assert find_trained_offsets(made, tensors_of(made), offsets) == {"0.weight": [64]}


def test_a_parameter_under_two_names_has_two_places() -> None:
    made = network()
    tensors = {**tensors_of(made), "head": made[0].weight.detach()}
    offsets = {"0.weight": 0, "1.weight": 64, "head": 128}
    assert find_trained_offsets(made, tensors, offsets) == {"0.weight": [0, 128]}


def test_a_parameter_that_engines_read_in_parts_has_no_place() -> None:
    made = network()
    upper, lower = made[0].weight.detach().split([1, 2])
    assert find_trained_offsets(made, {"a": upper, "b": lower}, {"a": 0, "b": 8}) is None


def test_a_trained_parameter_that_engines_do_not_read_has_no_place() -> None:
    made = network()
    merged = {"0.weight": made[0].weight.detach() + 1.0}
    assert find_trained_offsets(made, merged, {"0.weight": 0}) is None
