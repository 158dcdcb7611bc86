"""Run siiRL's CPGD: its loss and its advantages."""

from types import SimpleNamespace

from recording import Recorder, loss_and_gradient
from siirl.dag_worker import core_algos as core
from torch import Tensor

CORE = "siirl.dag_worker.core_algos"
RECORDER = Recorder(
    "siirl", "sii-research/siiRL", "af00a771817324f55f40c7b980d925cb008db6d8", ("tensordict",)
)
BATCH = RECORDER.tensors()
MASK = BATCH["mask"].double()


if __name__ == "__main__":
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=3.0
    )

    def cpgd(log_prob: Tensor) -> Tensor:
        return core.compute_policy_loss_cpgd(
            BATCH["behavior_log_prob"], log_prob, BATCH["advantage"], MASK, "token-mean", config
        )[0]

    RECORDER.case(
        "loss/cpgd",
        f"{CORE}.compute_policy_loss_cpgd",
        loss_and_gradient(cpgd, BATCH["log_prob"]),
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
    )
    for weight in ("STD_weight", "clip_filter_like_weight", "naive"):
        found, _ = core.compute_cpgd_outcome_advantage(
            BATCH["outcome_by_token"].clone(),
            MASK,
            BATCH["group"].numpy(),
            weight_factor_in_cpgd=weight,
        )
        RECORDER.case(
            f"advantage/{weight}",
            f"{CORE}.compute_cpgd_outcome_advantage",
            {"advantage": found},
            weight_factor_in_cpgd=weight,
        )
    RECORDER.save()
