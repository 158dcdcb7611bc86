"""Kernels of a decision and of a micro-batch of learning, by torch's profiler.

Keys, for `acting` and `learning`:
    seconds       of the profiled work, the profiler's own included
    busy          share of it in which the device computed; missing on a CPU
    kernels       name, milliseconds and calls of those that take longest
    trace         file for ui.perfetto.dev, beside this one
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.campaign.target import Target
from benchmarks.gpu.campaign.updating import RANK
from benchmarks.policy_sizes import make_observation
from vla_rl.types import Sampling

NUM_ROWS: Final = 8

NUM_KERNELS: Final = 15


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Profile acting and learning."""
    policy = target.policy(RANK)
    seen = [make_observation(policy.config, seed) for seed in range(NUM_ROWS)]
    samplings = [Sampling(seed=seed) for seed in range(NUM_ROWS)]

    def act() -> torch.Tensor:
        with torch.inference_mode():
            return policy.sample(policy.prepare(seen), samplings).tokens

    tokens = act().clone()
    temperatures = torch.ones(NUM_ROWS, device=target.device)

    def learn() -> None:
        log_probs, _ = policy.log_probs(policy.prepare(seen), tokens, temperatures)
        torch.autograd.backward(log_probs.sum())

    learn()
    yield "acting", profiled(target, "acting", act)
    yield "learning", profiled(target, "learning", learn)


def profiled(target: Target, name: str, run: Callable[[], object]) -> dict[str, object]:
    """Run under the profiler; return its figures, and write its trace."""
    activities = [ProfilerActivity.CPU]
    if target.is_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        seconds = target.seconds_of(run)
    trace = target.folder / f"profile-{name}.json.gz"
    recorded.export_chrome_trace(str(trace))
    times = list(_times(recorded, on_gpu=target.is_gpu))
    longest = sorted(times, key=lambda each: -each.microseconds)[:NUM_KERNELS]
    busy = sum(each.microseconds for each in times) / 1e6 / seconds
    return {
        "seconds": seconds,
        **({"busy": busy} if target.is_gpu else {}),
        "kernels": [
            {"name": each.name, "milliseconds": each.microseconds / 1e3, "calls": each.calls}
            for each in longest
        ],
        "trace": trace.name,
    }


class _Time(NamedTuple):
    name: str
    microseconds: float
    calls: int


def _times(recorded: profile, *, on_gpu: bool) -> Iterator[_Time]:
    """Yield the time of each kernel on a GPU, or of each operator on a CPU."""
    for each in recorded.key_averages():
        # operators on the host have their kernels' time too, which would count it twice
        if on_gpu and each.device_type == DeviceType.CUDA:
            yield _Time(each.key, each.self_device_time_total, each.count)
        elif not on_gpu:
            yield _Time(each.key, each.self_cpu_time_total, each.count)
