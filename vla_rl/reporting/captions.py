"""Lines of text below a frame."""

import textwrap

import numpy as np
from numpy.typing import NDArray

MIN_SIDE = 256
"""Smaller images are enlarged by a whole factor to at least this height and width, so that text can
be read."""

TITLE_LINES = 2
LINE_HEIGHT = 18
CHARACTER_WIDTH = 7
MARGIN = 4


def with_caption(image: NDArray[np.uint8], title: str, status: str) -> NDArray[np.uint8]:
    """Add text on black below an image: two lines of title and one of status.

    Args:
        image: uint8 [H, W, 3].
        title: wrapped to the width and cut off after two lines; characters outside ASCII are shown
            as '?'.
        status: the last line, cut off at the width.

    Returns: uint8 [H', W', 3] with even H' and W', as video codecs require; the size does not
    depend on the text.
    """
    import cv2  # slow to import, needed only to write videos

    factor = max(1, -(-MIN_SIDE // min(image.shape[:2])))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = large.shape[0], large.shape[1] - large.shape[1] % 2
    columns = (width - 2 * MARGIN) // CHARACTER_WIDTH
    lines = [*textwrap.wrap(_ascii(title), columns), "", ""][:TITLE_LINES]
    lines.append(_ascii(status)[:columns])
    bar = np.zeros((LINE_HEIGHT * len(lines) + 2 * MARGIN + height % 2, width, 3), dtype=np.uint8)
    for number, line in enumerate(lines, start=1):
        at = (MARGIN, number * LINE_HEIGHT)
        cv2.putText(bar, line, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA)
    return np.concatenate([large[:, :width], bar])


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
