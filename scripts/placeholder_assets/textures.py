"""Small images for floors, walls and wood, drawn by code.

PNG with a palette of 16 colours, stored without compression, so that the bytes are the same with
every zlib.
"""

import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import TypeAlias

Shade: TypeAlias = Callable[[int, int], float]
"""Brightness in [0, 1] at column x and row y."""


def textures() -> dict[str, bytes]:
    """Return PNGs by file name.

    The first five names are those of LIBERO's floor and wall styles.
    """
    return {
        "light-gray-floor-tile.png": _png(96, "#b9bbbb", "#e2e3e2", _tiles(96, 2, seed=1)),
        "gray_ceramic_tile.png": _png(96, "#8f9394", "#c3c6c5", _tiles(96, 3, seed=2)),
        "seamless_wood_planks_floor.png": _png(96, "#7a5230", "#b98b5a", _planks(96, 5, seed=3)),
        "light-gray-plaster.png": _png(64, "#c6c7c4", "#dcddd9", _plaster(64, seed=4)),
        "yellow_linen_wall_texture.png": _png(64, "#d8c58c", "#eadcae", _weave(64, seed=5)),
        "wood.png": _png(96, "#b8b2aa", "#ffffff", _grain(96, seed=6)),
        "wicker.png": _png(32, "#8a8276", "#ffffff", _wicker(32)),
        "table.png": _png(96, "#d5c0aa", "#f8e6d2", _planks(96, 4, seed=7)),
    }


def _tiles(size: int, across: int, seed: int) -> Shade:
    """Square tiles, each a little different, with dark joints."""
    rng, pitch = random.Random(seed), size // across
    tint = [[0.62 + 0.3 * rng.random() for _ in range(across)] for _ in range(across)]
    speckle = _noise(size, rng)

    def shade(x: int, y: int) -> float:
        if x % pitch == 0 or y % pitch == 0:
            return 0.0
        return tint[(y // pitch) % across][(x // pitch) % across] + 0.16 * (speckle[y][x] - 0.5)

    return shade


def _planks(size: int, across: int, seed: int) -> Shade:
    """Boards along x, with staggered ends and grain."""
    rng, pitch = random.Random(seed), size / across
    tint = [0.35 + 0.4 * rng.random() for _ in range(across)]
    end = [rng.randrange(size) for _ in range(across)]
    phase = [rng.random() * 6 for _ in range(across)]

    def shade(x: int, y: int) -> float:
        row = min(int(y / pitch), across - 1)
        if y - int(row * pitch) == 0 or x == end[row]:
            return 0.05
        turn = 2 * math.pi / size
        wave = math.sin(
            1.9 * (y - row * pitch)
            + phase[row]
            + 1.6 * math.sin(turn * x)
            + 0.7 * math.sin(3 * turn * x)
        )
        return tint[row] + 0.16 * wave

    return shade


def _grain(size: int, seed: int) -> Shade:
    """Fine wood grain in grey, to be tinted."""
    rng = random.Random(seed)
    phase = [rng.random() * 0.9 for _ in range(size)]
    turn = 2 * math.pi / size

    def shade(x: int, y: int) -> float:
        wave = math.sin(turn * 9 * y + 2.2 * math.sin(turn * x) + phase[y]) + 0.6 * math.sin(
            turn * 23 * y
        )
        return 0.72 + 0.16 * wave

    return shade


def _plaster(size: int, seed: int) -> Shade:
    speckle = _noise(size, random.Random(seed))
    return lambda x, y: 0.6 + 0.9 * (speckle[y][x] - 0.5)


def _weave(size: int, seed: int) -> Shade:
    speckle = _noise(size, random.Random(seed))
    return lambda x, y: (
        0.55 + 0.18 * ((x + y) % 2) + 0.12 * ((x // 2) % 2) + 0.3 * (speckle[y][x] - 0.5)
    )


def _wicker(size: int) -> Shade:
    """Wicker: strands over and under each other."""

    def shade(x: int, y: int) -> float:
        over = ((x // 8) + (y // 4)) % 2
        edge = min(y % 4, 3 - y % 4) / 1.0
        return (0.75 if over else 0.35) + 0.22 * edge - (0.3 if x % 8 == 0 else 0.0)

    return shade


def _noise(size: int, rng: random.Random) -> list[list[float]]:
    """Return random values, smoothed once over their neighbours, that repeat at the edges."""
    raw = [[rng.random() for _ in range(size)] for _ in range(size)]
    near = (-1, 0, 1)
    return [
        [
            sum(raw[(y + j) % size][(x + i) % size] for i in near for j in near) / 9
            for x in range(size)
        ]
        for y in range(size)
    ]


def _png(size: int, dark: str, light: str, shade: Shade) -> bytes:
    """Return a square image; 0 is `dark`, 1 is `light`, with 14 steps between."""
    low, high = bytes.fromhex(dark[1:]), bytes.fromhex(light[1:])
    palette = bytes(
        round(a + (b - a) * i / 15) for i in range(16) for a, b in zip(low, high, strict=True)
    )
    rows = bytearray()
    for y in range(size):
        rows.append(0)
        indices = [min(15, max(0, round(15 * shade(x, y)))) for x in range(size)]
        rows += bytes(a << 4 | b for a, b in zip(indices[::2], indices[1::2], strict=True))
    header = struct.pack(">IIBBBBB", size, size, 4, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", _stored(bytes(rows))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _stored(data: bytes) -> bytes:
    """Return a zlib stream of one stored block."""
    length = struct.pack("<HH", len(data), 0xFFFF ^ len(data))
    return b"\x78\x01\x01" + length + data + struct.pack(">I", zlib.adler32(data))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
