"""Meta-World's environments by suite and task."""

from vla_rl.types import EnvSpec


def metaworld_env(
    suite: str, task_id: int, *, image_size: int, step_limit: int | None, quality: str
) -> EnvSpec:
    """Return the specification of one task's environment; arguments as in `MetaWorldEnv`."""
    kwargs = {
        "task_id": task_id,
        "image_size": image_size,
        "step_limit": step_limit,
        "quality": quality,
    }
    return EnvSpec(id=f"vla_rl/{suite}-v0", kwargs=kwargs)
