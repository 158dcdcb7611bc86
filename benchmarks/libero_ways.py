"""The ways of stepping that `libero_throughput` compares; each builder is called in a process of
its own.

A builder returns a function that runs one round and returns its figure: CPU seconds an env step,
unless documented otherwise. Every round starts at an initial state, settles for 10 unmeasured
steps, and runs the same random actions.
"""

import contextlib
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import mujoco
import numpy as np

Run = Callable[[], float]
NUM_DRAWN_STEPS, NUM_BARE_STEPS, CHUNK_SIZE = 16, 60, 8
NUM_SUBSTEPS = 25
SIZE = 224
IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _actions(num_steps: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (num_steps, 7)).astype(np.float32)


def _original(suite: str, task_id: int, assets: str, cameras: int) -> tuple[Any, np.ndarray]:
    """Return LIBERO's own environment and its first initial state; with OpenGL, which our loader
    keeps from robosuite.
    """
    from vla_rl.envs.libero.assets import find_assets
    from vla_rl.envs.libero.loading import load_libero
    from vla_rl.envs.libero.task_files import read_init_states
    from vla_rl.envs.libero.tasks import find_task
    from vla_rl.envs.mujoco.loading import choose_graphics

    task = find_task(suite, task_id)
    code = load_libero(task.package)
    code.use_assets(find_assets(assets).path)
    drawing: dict[str, Any] = {"has_offscreen_renderer": False, "use_camera_obs": False}
    if cameras:
        backend = choose_graphics()
        context = importlib.import_module(f"robosuite.renderers.context.{backend}_context")
        name = {"egl": "EGLGLContext", "osmesa": "OSMesaGLContext"}[backend]
        bindings: Any = importlib.import_module("robosuite.utils.binding_utils")
        bindings.GLContext = getattr(context, name)
        names = ["agentview", "robot0_eye_in_hand"][:cameras]
        drawing = {"camera_names": names, "camera_heights": SIZE, "camera_widths": SIZE}
    env = code.wrapper.ControlEnv(bddl_file_name=str(task.goal_file), **drawing)
    env.seed(0)
    env.env.reset()
    return env, read_init_states(task.init_states_file)[0]


def _run_original(env: Any, init_state: np.ndarray, num_steps: int) -> Run:
    rows = _actions(num_steps).tolist()

    def run() -> float:
        env.env.timestep = 0
        env.set_init_state(init_state)
        started = time.process_time()
        for row in rows:
            env.step(row)
        return (time.process_time() - started) / num_steps

    return run


def original_step_drawn(suite: str, task_id: int, assets: str, cameras: int) -> Run:
    """Build robosuite's stepping, which renders its cameras at every control step."""
    return _run_original(*_original(suite, task_id, assets, cameras), NUM_DRAWN_STEPS)


def siirl_step_drawn(suite: str, task_id: int, assets: str) -> Run:
    """Build hf-libero's SubprocVectorEnv with one environment.

    Measures the CPU time of both processes.
    """
    from vla_rl.envs.libero.loading import config_folder, load_libero
    from vla_rl.envs.libero.packages import find_package_root

    os.environ["LIBERO_CONFIG_PATH"] = config_folder(
        find_package_root("libero")
    )  # else LIBERO asks on stdin, in the other process too
    load_libero("libero")
    vector = importlib.import_module("libero.libero.envs.venv")
    init_states: list[np.ndarray] = []

    def make() -> Any:
        return _original(suite, task_id, assets, cameras=2)[0]

    from vla_rl.envs.libero.task_files import read_init_states
    from vla_rl.envs.libero.tasks import find_task

    init_states.append(read_init_states(find_task(suite, task_id).init_states_file)[0])
    envs = vector.SubprocVectorEnv([make])
    (worker,) = envs.workers
    rows = _actions(NUM_DRAWN_STEPS)

    def cpu_time_s() -> float:
        fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def run() -> float:
        envs.set_init_state(init_states)
        started = cpu_time_s()
        for row in rows:
            envs.step(row[None])
        return (cpu_time_s() - started) / len(rows)

    return run


def our_step_drawn(
    suite: str, task_id: int, assets: str, cameras: int, mode: Any, size: int = SIZE
) -> Run:
    """Build `LiberoEnv`, in chunks; `mode` is that of physics and of rendering."""
    from vla_rl.env_workers.checked_env import run_chunk
    from vla_rl.envs.libero import LiberoEnv

    env = LiberoEnv(
        suite,
        task_id,
        assets,
        size,
        step_limit=1000,
        wrist_image=cameras == 2,
        physics=mode,
        quality=mode,
    )
    env.open_graphics()
    rows = _actions(NUM_DRAWN_STEPS)

    def run() -> float:
        env.reset(options={"init_state_id": 0})
        started = time.process_time()
        for start in range(0, len(rows), CHUNK_SIZE):
            run_chunk(env, rows[start : start + CHUNK_SIZE])
        return (time.process_time() - started) / len(rows)

    return run


def fast_step_with_whole_meshes(suite: str, task_id: int, assets: str, size: int) -> Run:
    """Build `LiberoEnv` in the fast mode, but with the meshes and textures of the quality "exact"."""
    with _whole_meshes():
        return our_step_drawn(suite, task_id, assets, cameras=2, mode="fast", size=size)


def image_differences(
    suite: str, task_id: int, assets: str, size: int
) -> Callable[[], dict[str, float]]:
    """Build the measurement of fast images against fast images with whole meshes and textures:
    mean and 99th percentile of the absolute differences of their values, 0 to 255.
    """
    from vla_rl.envs.libero import LiberoEnv

    def images() -> np.ndarray:
        env = LiberoEnv(suite, task_id, assets, size, physics="fast", quality="fast")
        seen = [env.reset(options={"init_state_id": 0})[0]]
        seen += [env.step(row)[0] for row in _actions(NUM_DRAWN_STEPS)]
        env.close()
        return np.array([each[name] for each in seen for name in ("image", "wrist_image")], int)

    def run() -> dict[str, float]:
        with _whole_meshes():
            before = images()
        differences = np.abs(images() - before)
        return {
            "mean": float(differences.mean()),
            "99th percentile": float(np.percentile(differences, 99)),
        }

    return run


@contextlib.contextmanager
def _whole_meshes() -> Iterator[None]:
    """Within this context, cameras of the quality "fast" keep all triangles and texture pixels."""
    from vla_rl.envs.mujoco import drawing_quality

    with mock.patch.multiple(
        drawing_quality,
        simplified_meshes=lambda *_: contextlib.nullcontext(),
        reduced_textures=lambda *_: contextlib.nullcontext(),
    ):
        yield


def _scene(suite: str, task_id: int, assets: str) -> tuple[Any, np.ndarray]:
    from vla_rl.envs.libero.assets import find_assets
    from vla_rl.envs.libero.scene import Scene
    from vla_rl.envs.libero.task_files import read_init_states
    from vla_rl.envs.libero.tasks import find_task

    task = find_task(suite, task_id)
    return Scene(task, find_assets(assets).path, scene_seed=0), read_init_states(
        task.init_states_file
    )


def stepping(suite: str, task_id: int, assets: str) -> Callable[[], dict[str, float]]:
    """Build the measurement of CPU seconds a control step without cameras, by way: all four take
    turns step by step.

    `floor` is 25 bare `mj_step`s with the controls that robosuite wrote in the same step.
    """
    original, init_state = _original(suite, task_id, assets, cameras=0)
    recorder, _ = _original(suite, task_id, assets, cameras=0)
    model, data = recorder.sim.model._model, recorder.sim.data._data
    rows = _actions(NUM_BARE_STEPS)
    controls = _recorded_controls(recorder, init_state, rows)
    exact, _ = _scene(suite, task_id, assets)
    fast, _ = _scene(suite, task_id, assets)
    fast.physics = "fast"

    def floor_step(controls_of_step: list[np.ndarray]) -> None:
        for control in controls_of_step:
            data.ctrl[:] = control
            mujoco.mj_step(model, data)

    def run() -> dict[str, float]:
        for env in (original, recorder):
            env.env.timestep = 0
            env.set_init_state(init_state)
        for scene in (exact, fast):
            scene.start_episode(init_state)
        took_s: dict[str, float] = dict.fromkeys(("original", "exact", "fast", "floor"), 0.0)
        for number, row in enumerate(rows):
            turns: dict[str, tuple[Callable[[Any], Any], Any]] = {
                "original": (original.step, row.tolist()),
                "exact": (exact.run_control_step, row.astype(np.float64)),
                "fast": (fast.run_control_step, row.astype(np.float64)),
                "floor": (
                    floor_step,
                    controls[number * NUM_SUBSTEPS : (number + 1) * NUM_SUBSTEPS],
                ),
            }
            for name, (step, argument) in turns.items():
                started = time.process_time()
                step(argument)
                took_s[name] += time.process_time() - started
        return {name: seconds / len(rows) for name, seconds in took_s.items()}

    return run


def _recorded_controls(env: Any, init_state: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Return the values that robosuite's stepping writes into MuJoCo's controls, substep by
    substep.
    """
    controls: list[np.ndarray] = []
    sim = env.env.sim
    step = sim.step

    def recorded_step(*arguments: Any) -> None:
        controls.append(sim.data._data.ctrl.copy())
        step(*arguments)

    sim.step = recorded_step
    env.set_init_state(init_state)
    for row in rows.tolist():
        env.step(row)
    sim.step = step
    return controls


def reset(suite: str, task_id: int, assets: str) -> Run:
    """Build the measurement of a reset: CPU milliseconds without settling and rendering, the median
    over all starts.
    """
    scene, init_states = _scene(suite, task_id, assets)

    def run() -> float:
        took_s = []
        for init_state in init_states:
            started = time.process_time()
            scene.start_episode(init_state)
            took_s.append(time.process_time() - started)
        return 1e3 * float(np.median(took_s))

    return run


def worker_memory(suite: str, task_id: int, assets: str, mode: Any) -> Run:
    """Build the measurement of private megabytes (USS) of one of two forked workers after three
    tasks, one 224-pixel camera.

    There are two, as in a pool of several workers, because the pages of a library that one process
    loads count as private.
    """
    from vla_rl.envs.libero import LiberoEnv

    tasks = [task_id, task_id + 1, task_id + 2]
    arguments: dict[str, Any] = {
        "suite": suite,
        "assets": assets,
        "image_size": SIZE,
        "wrist_image": False,
    }
    for task in tasks:
        LiberoEnv.prepare(task_id=task, **arguments)

    def run_workers(counts: list[int]) -> tuple[Any, Connection, float]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_run_tasks, args=(counts, mode, arguments, theirs))
        worker.start()
        return worker, ours, float(ours.recv())

    def run() -> float:
        workers = [run_workers(tasks[:1]), run_workers(tasks)]
        for worker, pipe, _ in workers:
            pipe.send("end")
            worker.join()
        return workers[-1][2]

    return run


def _run_tasks(tasks: list[int], mode: Any, arguments: dict[str, Any], pipe: Connection) -> None:
    """Run a chunk of each task in turn, send the largest private memory on the way, and wait for
    the order to end.
    """
    from vla_rl.env_workers.checked_env import run_chunk
    from vla_rl.envs.libero import LiberoEnv

    largest = 0.0
    for task in tasks:
        env = LiberoEnv(task_id=task, physics=mode, quality=mode, **arguments)
        env.reset(options={"init_state_id": 0})
        run_chunk(env, _actions(CHUNK_SIZE))
        largest = max(largest, _private_mb())
        env.close()
    pipe.send(largest)
    pipe.recv()
    os._exit(0)


def _private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


WAYS: dict[str, Callable[..., Callable[[], Any]]] = {
    "original step drawn": original_step_drawn,
    "siirl step drawn": siirl_step_drawn,
    "our step drawn": our_step_drawn,
    "fast step with whole meshes": fast_step_with_whole_meshes,
    "image differences": image_differences,
    "stepping": stepping,
    "reset": reset,
    "worker memory": worker_memory,
}
