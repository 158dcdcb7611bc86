"""A conversation is observed with its images, and they come back in their order."""

import numpy as np

from vla_rl.types.observation import images_of, observed_conversation


def test_a_conversation_of_words_alone_has_no_keys_of_images() -> None:
    tokens = np.arange(3)
    seen = observed_conversation(tokens)
    assert seen == {"prompt_tokens": tokens}
    assert images_of(seen) == ()


def test_more_than_ten_images_keep_their_order() -> None:
    images = [np.full((1, 1, 3), number, np.uint8) for number in range(12)]
    seen = observed_conversation(np.arange(30), images, range(0, 24, 2))
    assert [int(image[0, 0, 0]) for image in images_of(seen)] == list(range(12))
    assert seen["image_starts"].dtype == np.int64
    assert seen["image_starts"].tolist() == list(range(0, 24, 2))
