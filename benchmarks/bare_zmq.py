"""The lower bound for `env_transport`: frames in shared memory and a short message over ZeroMQ, and
nothing else.

No types, no deadlines, no supervision, no concurrency: a parent sends a message to every simulator
and then waits for each; children block until they get one, step, copy the frames to shared memory,
and answer.
"""

import mmap
import multiprocessing
import os
import secrets
from typing import Self

import numpy as np
import zmq

from benchmarks.frames_env import FRAME, FramesEnv

_STATE_BYTES = 4096
_NOTE, _ANSWER = b"x" * 46, b"y" * 46
_FRAME_BYTES = int(np.prod(FRAME))
_SIMULATOR_BYTES = 2 * (2 * _FRAME_BYTES + _STATE_BYTES)
"""Bytes of two slots, because the parent may still read one of them while the next is written."""


class BareSimulators:
    """Starts `num_envs` processes; make it before any thread or loop, because it forks."""

    def __init__(self, num_envs: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._addresses = [
            f"ipc://@vla_rl-bare-{os.getpid()}-{secrets.token_hex(8)}" for _ in range(num_envs)
        ]
        self._memories = [mmap.mmap(-1, _SIMULATOR_BYTES) for _ in range(num_envs)]
        fork = multiprocessing.get_context("fork")
        self._processes = [
            fork.Process(target=_simulate, args=pair, daemon=True)
            for pair in zip(self._addresses, self._memories, strict=True)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PAIR) for _ in self._addresses]
        for socket, address in zip(self._sockets, self._addresses, strict=True):
            socket.bind(address)
        self.step()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._context is not None
        for socket, process in zip(self._sockets, self._processes, strict=True):
            socket.send(b"")
            process.join()
        self._context.destroy(linger=0)

    def step(self) -> None:
        """Run one control step in each simulator; the frames are read in place."""
        for socket in self._sockets:
            socket.send(_NOTE)
        for socket in self._sockets:
            socket.recv()


def _simulate(address: str, memory: mmap.mmap) -> None:
    env, action = FramesEnv(), np.zeros(7, np.float32)
    env.reset(seed=0)
    slots = []
    for begin in (0, _SIMULATOR_BYTES // 2):
        frames: np.ndarray = np.ndarray((2, *FRAME), np.uint8, memory, begin)
        state: np.ndarray = np.ndarray(8, np.float32, memory, begin + 2 * _FRAME_BYTES)
        slots.append((frames, state))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    count = 0
    while socket.recv():
        observation, *_ = env.step(action)
        frames, state = slots[count % 2]
        frames[0], frames[1] = observation["image"], observation["wrist_image"]
        state[:] = observation["state"]
        count += 1
        socket.send(_ANSWER)
    socket.close(linger=0)
    context.term()
