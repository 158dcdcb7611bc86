"""Classes that users build by keyword say which argument does not fit."""

import msgspec
import pytest

from vla_rl.types.struct import ExplainsFields


class Lamp(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A class with one required field."""

    colour: str
    brightness: float = 1.0

    def __post_init__(self) -> None:
        if self.brightness < 0:
            raise TypeError("too dark")


def test_a_wrong_keyword_is_named_with_the_nearest_field() -> None:
    with pytest.raises(TypeError, match=r"^Lamp has no field 'color'; did you mean 'colour'\?$"):
        Lamp(color="red")  # type: ignore[call-arg]


def test_a_keyword_that_resembles_no_field_is_answered_with_all_fields() -> None:
    with pytest.raises(TypeError, match="Lamp has no field 'x'; its fields: colour, brightness"):
        Lamp(colour="red", x=1)  # type: ignore[call-arg]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(TypeError, match=r"^Lamp lacks 'colour'$"):
        Lamp(brightness=0.5)  # type: ignore[call-arg]


def test_arguments_without_names_are_counted() -> None:
    with pytest.raises(TypeError, match="Lamp got 1 argument without a name, expected keywords"):
        Lamp("red")  # type: ignore[misc,call-arg]


def test_an_error_of_the_class_itself_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match=r"^too dark$"):
        Lamp(colour="red", brightness=-1.0)
