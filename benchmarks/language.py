"""Replies of the torch engine against transformers' `generate` and vLLM, with one public model.

    python -m benchmarks.language [--policy smollm2] [--rounds 1] [--threads 1] [--no-vllm]

64 prompts of different lengths, 16 replies at a time, float32, sampled at temperature 1. Each reply has
a length of its own from 16 to 256 tokens, the same on both sides. transformers generates batch after
batch, padded on the left, and waits for the longest reply of each, as its users do; tokens behind the
end of a reply do not count.

Both compute in this process with the same threads, and take turns. Tokens are counted for each CPU
second, because other programs take their share of the clock.

Keys of the last line:
    tokens_per_s_vs_transformers_generate   the torch engine's tokens over those of `generate`
    tokens_per_s_vs_transformers_equal      the same if all replies are equally long, so that no row
                                            of `generate` waits for another
    tokens_per_s                            the torch engine's tokens for a CPU second
    vllm_vs_torch_tokens_per_s              vLLM's tokens over the torch engine's, of replies that may
                                            end by themselves, all processes of each
    group_prefill_share                     prompt tokens of a group of 8 that were not computed again;
                                            7/8 are possible
    logprob_gap                             largest difference of a log-prob from the learner's
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
import uvloop

from benchmarks.interleaved import print_json_line, print_table
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.errors import CheckpointError
from vla_rl.models.language import SMOLLM2, CausalLanguageModel
from vla_rl.models.language.checkpoint import local_folder
from vla_rl.types import Completion, Message, Sampling

GROUP = 8
NUM_CHECKED = 16
"""Replies whose log-probs are compared with the learner's."""

SUBJECTS = (
    "the tides",
    "a bicycle gear",
    "bread",
    "the number 91",
    "rivers that end in no sea",
    "rain",
)
REQUESTS = (
    "Explain {subject}.",
    "Write a few lines about {subject} for a child, and end with a question.",
    "You are asked about {subject} by somebody who knows the usual answer and doubts it. Say first what "
    "is certain, then what is only likely, and give an example with numbers for each of the two.",
)


class CountedReading(CausalLanguageModel):
    """Counts the tokens that it reads. Replies may be told to go on until their limit."""

    num_read = 0
    ends_replies = True

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a reply; none if it goes on."""
        return super().stop_tokens if self.ends_replies else frozenset()

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Read more tokens, and count them."""
        self.num_read += sum(map(len, tokens))
        return super().extend(memory, slots, starts, tokens)


class Work:
    """Prompts, and how long their replies are.

    Args:
        policy: renders the prompts.
        num_prompts: number of prompts.
        shortest, longest: lengths of replies, drawn in between; the last one has the longest.
    """

    def __init__(
        self, policy: CausalLanguageModel, num_prompts: int, shortest: int, longest: int
    ) -> None:
        draw = random.Random(0)
        self.prompts = [
            policy.render((Message(role="user", content=_question(number)),))
            for number in range(num_prompts)
        ]
        self.lengths = [draw.randint(shortest, longest) for _ in range(num_prompts - 1)] + [longest]

    @property
    def num_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(self.lengths)


def _question(number: int) -> str:
    subject = SUBJECTS[number % len(SUBJECTS)]
    return REQUESTS[number // 2 % len(REQUESTS)].format(subject=subject) + f" ({number})"


class PlainGenerate:
    """transformers' own `generate`, with its own attention.

    Args:
        folder: a checkpoint, which transformers reads by itself.
        rows: prompts of one batch.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        # transformers gives a network in evaluation mode
        self._network: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        # lengths are given, so that both sides do the same
        self._network.generation_config.eos_token_id = None
        self._rows = rows

    def run(self, work: Work) -> None:
        """Generate all replies, batch after batch, each to its longest."""
        for first in range(0, len(work.prompts), self._rows):
            prompts = work.prompts[first : first + self._rows]
            width = max(map(len, prompts))
            tokens = torch.zeros(len(prompts), width, dtype=torch.long)
            mask = torch.zeros_like(tokens)
            for row, prompt in enumerate(prompts):
                tokens[row, width - len(prompt) :] = torch.from_numpy(prompt)
                mask[row, width - len(prompt) :] = 1
            longest = max(work.lengths[first : first + self._rows])
            made = self._network.generate(
                tokens,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                max_new_tokens=longest,
            )
            if made.shape[1] != width + longest:
                raise RuntimeError(f"generate gave {made.shape[1] - width} tokens, not {longest}")


async def reply_to_all(engine: Any, work: Work) -> list[Completion]:
    """Ask for all replies at once; the engine decides which run together."""
    async with asyncio.TaskGroup() as tasks:
        replies = [
            tasks.create_task(
                engine.generate(prompt, sampling=Sampling(seed=number), max_tokens=length)
            )
            for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
    return [reply.result() for reply in replies]


def report(line: str) -> None:
    """Print a figure on the way: the whole takes ten CPU minutes."""
    print(line, file=sys.stderr, flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it started and that still run."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def compare_generate(
    policy: CountedReading, plain: PlainGenerate, lane: DeviceLane, work: Work, options: Any
) -> tuple[float, float, list[Completion]]:
    """Return the ratio of tokens a CPU second, the engine's, and its replies; medians of rounds."""
    ratios, rates, replies = [], [], []
    policy.ends_replies = False
    config = EngineConfig(max_batch=options.rows, kept_conversations=0, max_reply=options.longest)
    for _ in range(options.rounds):
        began = time.process_time()
        await lane.run(plain.run, work)
        theirs = time.process_time() - began
        began = time.process_time()
        async with TorchChatEngine(policy, lane, config) as engine:
            replies = await reply_to_all(engine, work)
        ours = time.process_time() - began
        if [len(reply.tokens) for reply in replies] != work.lengths:
            raise RuntimeError("a reply of the torch engine does not have the length asked for")
        ratios.append(theirs / ours)
        rates.append(work.num_tokens / ours)
        report(f"{work.num_tokens} tokens: generate {theirs:.1f}, torch engine {ours:.1f} CPU s")
    policy.ends_replies = True
    return float(np.median(ratios)), float(np.median(rates)), replies


async def compare_vllm(policy: CountedReading, lane: DeviceLane, work: Work, options: Any) -> float:
    """Return vLLM's tokens a CPU second over the torch engine's."""
    from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
    from vla_rl.models.vllm import serve

    config = EngineConfig(
        max_batch=options.rows,
        max_reply=options.longest,
        vllm=VllmConfig(max_requests=options.rows, num_threads=options.threads),
    )
    engines: dict[str, Callable[[], Any]] = {
        "vllm": lambda: VllmChatEngine(serve(policy), lane, config),
        "torch": lambda: TorchChatEngine(policy, lane, config),
    }
    rates: dict[str, float] = {}
    for name, make in engines.items():
        async with make() as engine:
            await engine.generate(work.prompts[0], max_tokens=2)
            began = cpu_seconds()
            replies = await reply_to_all(engine, work)
            rates[name] = sum(len(reply.tokens) for reply in replies) / (cpu_seconds() - began)
            report(f"{name}: {rates[name]:.1f} tokens a CPU second")
    return rates["vllm"] / rates["torch"]


async def measure_group(policy: CountedReading, lane: DeviceLane, prompt: np.ndarray) -> float:
    """Return the share of a group's prompt tokens that the model did not read again."""
    before = policy.num_read
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=GROUP)) as engine:
        replies = await asyncio.gather(
            *(
                engine.generate(prompt, sampling=Sampling(seed=seed), max_tokens=4)
                for seed in range(GROUP)
            )
        )
    # the last token of a reply is never read
    num_read = policy.num_read - before - sum(len(reply.tokens) - 1 for reply in replies)
    return 1.0 - num_read / (GROUP * len(prompt))


def measure_gap(policy: CausalLanguageModel, replies: Sequence[Completion]) -> float:
    """Return the largest difference of a reply's log-prob from what the learner computes."""
    largest = 0.0
    for reply in replies:
        batch = policy.prepare([{"prompt_tokens": reply.prompt_tokens}])
        with torch.inference_mode():
            found, _ = policy.log_probs(batch, torch.from_numpy(reply.tokens)[None], torch.ones(1))
        largest = max(largest, float(np.abs(found.numpy()[0] - reply.log_probs).max()))
    return largest


async def measure(policy: CountedReading, folder: Path, options: Any) -> dict[str, float | None]:
    """Measure all figures."""
    work = Work(policy, options.prompts, options.shortest, options.longest)
    equal = Work(policy, options.rows, options.longest // 4, options.longest // 4)
    plain = PlainGenerate(folder, options.rows)
    async with DeviceLane(num_threads=options.threads) as lane:
        ratio, rate, replies = await compare_generate(policy, plain, lane, work, options)
        equal_ratio, _, _ = await compare_generate(policy, plain, lane, equal, options)
        return {
            "tokens_per_s_vs_transformers_generate": ratio,
            "tokens_per_s_vs_transformers_equal": equal_ratio,
            "tokens_per_s": rate,
            "vllm_vs_torch_tokens_per_s": await compare_vllm(policy, lane, work, options)
            if options.vllm
            else None,
            "group_prefill_share": await measure_group(policy, lane, work.prompts[0]),
            "logprob_gap": await lane.run(measure_gap, policy, replies[:NUM_CHECKED]),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default=SMOLLM2, help="smollm2, or a folder of another model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="replies that run together")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest reply")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest reply")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    try:
        policy = CountedReading.load(options.policy)
    except CheckpointError as error:
        parser.exit(1, f"{error}\n")
    figures = uvloop.run(measure(policy, local_folder(options.policy), options))
    print_table(f"Replies of {options.policy}, float32, {options.threads} threads", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
