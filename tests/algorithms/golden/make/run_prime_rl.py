"""Run prime-rl's functions: its default loss (DPPO), IPO, the loss over packed sequences, GRPO and
MaxRL advantages.
"""

import asyncio
from types import SimpleNamespace

from fakes import fake_packages

fake_packages("verifiers", "renderers")

import torch  # noqa: E402
from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig  # noqa: E402
from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm  # noqa: E402
from prime_rl.orchestrator.algo.max_rl import MaxRLAlgorithm  # noqa: E402
from prime_rl.trainer.rl import loss as prime  # noqa: E402
from recording import Recorder, loss_and_gradient  # noqa: E402
from torch import Tensor  # noqa: E402

LOSS, ALGO = "prime_rl.trainer.rl.loss", "prime_rl.orchestrator.algo"
RECORDER = Recorder(
    "prime_rl",
    "PrimeIntellect-ai/prime-rl",
    "559b44772e471d1538537b8805cc77f3824a5e64",
    ("pydantic",),
)
BATCH = RECORDER.tensors()
MASK = BATCH["mask"]


def losses() -> None:
    configs = {
        "dppo": DefaultLossConfig(),
        "dppo/narrow": DefaultLossConfig(dppo_mask_low=0.05, dppo_mask_high=0.08, kl_tau=0.5),
        "ipo": IPOLossConfig(),
        "ipo/narrow": IPOLossConfig(ipo_threshold=0.05, kl_tau=0.5),
    }
    for name, config in configs.items():
        function = prime.setup_rl_loss_fn(config)

        def packed(log_prob: Tensor, function=function) -> Tensor:
            return prime.compute_loss(
                trainer_logprobs=list(log_prob),
                inference_logprobs=list(BATCH["behavior_log_prob"]),
                ref_logprobs=None,
                advantages=list(BATCH["advantage"]),
                loss_mask=list(MASK),
                rl_weights=None,
                ce_weights=None,
                ref_kl_weights=None,
                rl_loss_fn=function,
                rl_scale=int(MASK.sum()),
                ce_scale=1,
                ref_kl_scale=1,
            )[0]

        RECORDER.case(
            f"loss/{name}",
            f"{LOSS}.compute_loss, {LOSS}.{'ipo' if 'ipo' in name else 'default'}_loss_fn",
            loss_and_gradient(packed, BATCH["log_prob"]),
            rl_scale=int(MASK.sum()),
            **config.model_dump(),
        )


def advantages() -> None:
    for name, kind in (("grpo", GRPOAlgorithm), ("max_rl", MaxRLAlgorithm)):
        found = torch.zeros(len(BATCH["group"]))
        algorithm = SimpleNamespace(length_penalty=None)
        for group in BATCH["group"].unique().tolist():
            rows = (BATCH["group"] == group).nonzero()[:, 0].tolist()
            nodes = [SimpleNamespace(mask=[True], token_ids=[0], advantages=None) for _ in rows]
            traces = [
                SimpleNamespace(
                    reward=float(BATCH["rewards"][row]),
                    nodes=[node],
                    has_error=False,
                    agent=SimpleNamespace(trainable=True),
                    id=row,
                )
                for row, node in zip(rows, nodes, strict=True)
            ]
            asyncio.run(kind.score_group(algorithm, [SimpleNamespace(traces=traces)]))
            found[rows] = torch.tensor([node.advantages[0] for node in nodes])
        RECORDER.case(
            f"advantage/{name}", f"{ALGO}.{name}.{kind.__name__}.score_group", {"advantage": found}
        )


if __name__ == "__main__":
    losses()
    advantages()
    RECORDER.save()
