"""OpenGL that draws, here and in a fork, as simulators do."""

from collections.abc import Iterable
from typing import Final

from vla_rl.cli.doctor.finding import Finding, Patient
from vla_rl.cli.doctor.trial import try_apart

DRAWING: Final = "vla_rl.cli.doctor.drawing"


def opengl_that_draws(patient: Patient) -> Iterable[Finding]:
    """Check that a picture can be drawn off screen, and also in a process that was forked before.

    Simulators are such forks. The second is tried only if the first works.
    """
    drawn = try_apart(["-m", DRAWING, "here"], patient.seconds)
    if not drawn.worked:
        yield Finding(
            f"no picture can be drawn ({drawn.words})",
            "Simulators with cameras (LIBERO, Meta-World) cannot start",
            "Run `apt-get install libegl1 libgl1` (or libosmesa6, on the CPU); unset MUJOCO_GL and "
            "MUJOCO_EGL_DEVICE_ID; a container needs NVIDIA_DRIVER_CAPABILITIES=all",
        )
        return
    if drawn.words == "osmesa":
        yield Finding(
            "pictures are drawn by OSMesa",
            "It draws on the CPU, and slower than EGL",
            "Run `apt-get install libegl1 libgl1`",
            "warning",
        )
    forked = try_apart(["-m", DRAWING, "fork"], patient.seconds)
    if not forked.worked:
        yield Finding(
            f"a forked process cannot draw ({forked.words})",
            "Simulators are forked from a server that has built the scenes; each would hang at its "
            "first picture",
            "Look for a sitecustomize.py or .pth file that opens OpenGL or a GPU in every Python; "
            "or set --simulators.start spawn",
        )
