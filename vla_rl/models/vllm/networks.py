"""Networks inside an engine process: our towers and projectors, vLLM's Llama.

    images uint8 ─► FusedVisionBackbone ─► Projector ─┐
    proprio ─────► ProprioProjector ─────────────────┴─► embeddings at the placeholders ─► Llama with paged attention

Parameters have the names of the learner's network, so the weights it publishes load unchanged.
OpenVLA goes token after token, as vLLM generates. OpenVLA-OFT computes a whole chunk in one
bidirectional pass, sampled in the engine:

    position  0     1 .. F      F + 1 .. F + P - 1    then T of them    then
    token     BOS   features    prompt without BOS    placeholders      stop

Number k is read one position before its placeholder, as in `OpenVlaOftNetwork`; the noise of a row
comes from its own seed, as in the torch engine, so both choose the same tokens from the same
logits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.engines.sampling import choose_tokens
from vla_rl.engines.vllm.adapter import (
    MULTIMODAL_REGISTRY,
    AutoWeightsLoader,
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    MultiModalFieldConfig,
    Pooler,
    SupportsMultiModal,
    init_vllm_registered_model,
    maybe_prefix,
)
from vla_rl.engines.vllm.served import (
    POOLING_TASK,
    EngineFeature,
    EngineRequest,
    engine_input,
)
from vla_rl.models.prismatic.config import (
    OpenVlaConfig,
    OpenVlaOftConfig,
    PrismaticConfig,
    ProprioConfig,
)
from vla_rl.models.prismatic.network import (
    FusedVisionBackbone,
    Projector,
    ProprioProjector,
    build_tower,
)
from vla_rl.types import Sampling

MODALITY = "image"


class ServedPrismatic(nn.Module, SupportsMultiModal):  # type: ignore[misc]
    """Base class of the served families: everything up to the trunk's output.

    Args:
        vllm_config: the engine's configuration.
        policy: the policy's configuration.
        proprio: configuration of its proprioception, if it has one.
        prefix: prefix of parameter names.
    """

    _mark_tower_model: Callable[..., AbstractContextManager[None]]
    _mark_language_model: Callable[..., AbstractContextManager[None]]

    def __init__(
        self, vllm_config: Any, policy: PrismaticConfig, proprio: ProprioConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        # vLLM's pooling outputs carry no version of the weights, so the network itself knows it.
        self.weight_version = -1
        with self._mark_tower_model(vllm_config, MODALITY):
            self.vision_backbone: FusedVisionBackbone = FusedVisionBackbone(
                *(
                    build_tower(tower.timm_id, policy.image_size, tower.overrides)
                    for tower in (policy.featurizer, policy.fused_featurizer)
                ),
                pixels=policy.pixels,
            )
            self.vision_backbone.materialise_buffers(vllm_config.device_config.device)
            self.projector: Projector = Projector(
                self.vision_backbone.width, policy.llm.hidden_size
            )
            self.proprio_projector = (
                ProprioProjector(len(proprio.low), policy.llm.hidden_size) if proprio else None
            )
        with self._mark_language_model(vllm_config):
            self.language_model: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=self.config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **features: Tensor) -> list[Tensor]:
        """Return one [num_features, D] for each request: patches of all its images, then
        proprioception.
        """
        if "images" not in features:
            return []
        tokens = self.projector(self.vision_backbone(_stacked(features["images"])))
        if self.proprio_projector is not None:
            proprio = _stacked(features["proprio"]).to(tokens.dtype)
            tokens = torch.cat([tokens, self.proprio_projector(proprio)[:, None]], dim=1)
        return list(tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the trunk's output for the tokens of all requests of a step, [tokens, D]."""
        hidden: Tensor = self.language_model.model(
            input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits over the whole embedding table, [rows, table_size]."""
        logits: Tensor = self.language_model.compute_logits(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by the learner's names."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded


def _stacked(value: Tensor | Sequence[Tensor]) -> Tensor:
    return value if isinstance(value, Tensor) else torch.stack(list(value))


class ServedInfo(BaseProcessingInfo):  # type: ignore[misc]
    """One item for each request, with a fixed number of tokens."""

    # All images of an observation are one item, because vLLM caches and schedules by item.
    def get_supported_mm_limits(self) -> Mapping[str, int]:
        """Return the limit, one item: all images of an observation and its proprioception."""
        return {MODALITY: 1}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the number of tokens of an item, which is constant."""
        return {MODALITY: self.get_hf_config().num_features}


class ServedDummies(BaseDummyInputsBuilder):  # type: ignore[misc]
    """Dummy inputs with which vLLM measures memory: black images."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return no text: this processor takes none."""
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> dict[str, Any]:
        """Return no data: the processor makes its own."""
        return {}


class ServedProcessor(BaseMultiModalProcessor):  # type: ignore[misc]
    """Processor for dummies only: real requests arrive processed
    (`vla_rl.models.vllm.serve`).
    """

    requires_tokenizer = False

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Return the dummy request."""
        config = self.info.get_hf_config()
        policy = config.policy
        size, cameras = policy["image_size"], len(policy["cameras"])
        values = {"images": torch.zeros(cameras, 3, size, size, dtype=torch.uint8)}
        if policy.get("proprio"):
            values["proprio"] = torch.zeros(len(policy["proprio"]["low"]))
        shown = EngineFeature(1, config.num_features, values)
        request = EngineRequest([1] * (1 + config.num_features), (shown,))
        return engine_input(request, MODALITY, "dummy")

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Any
    ) -> Mapping[str, Any]:
        return {name: MultiModalFieldConfig.batched(MODALITY) for name in ("images", "proprio")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[Any]:
        return []


register_processor = MULTIMODAL_REGISTRY.register_processor(
    ServedProcessor, info=ServedInfo, dummy_inputs=ServedDummies
)
"""Class decorator of the served families."""


def policy_config(vllm_config: Any, kind: type[PrismaticConfig]) -> Any:
    """Return the policy's own configuration."""
    return msgspec.convert(vllm_config.model_config.hf_config.policy, kind)


@register_processor
class ServedOpenVla(ServedPrismatic):
    """A causal trunk behind two towers; vLLM samples each token."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config, policy_config(vllm_config, OpenVlaConfig), None, prefix)


class ActionPooler(Pooler):  # type: ignore[misc]
    """Reads, scores and samples the action tokens of every request of a step."""

    def __init__(self, config: OpenVlaOftConfig, model: "ServedOpenVlaOft") -> None:
        super().__init__()
        self._num_tokens, self._num_behind = (
            config.num_action_tokens,
            1 + int(config.has_stop_token),
        )
        self._rows = slice(config.llm.vocab_size - config.num_bins, config.llm.vocab_size)
        self._model = [model]  # in a list, so that it is not registered as a submodule

    def get_supported_tasks(self) -> set[str]:
        """Return the task whose parameters carry ours."""
        return {POOLING_TASK}

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> list[Tensor]:
        """Return float32 [3, T] for each request: index among the action tokens, log-prob, weight
        version.
        """
        model = self._model[0]
        cursor = pooling_metadata.get_pooling_cursor()
        samplings = [_sampling(params.extra_kwargs) for params in pooling_metadata.pooling_params]
        last = cursor.last_token_indices_gpu
        positions = (
            last[:, None]
            - self._num_behind
            - torch.arange(self._num_tokens - 1, -1, -1, device=last.device)
        )
        read = hidden_states[
            positions.clamp(min=0)
        ]  # vLLM's own dummies may be shorter than a chunk
        # Sampled here, in the engine: 56 x 256 logits for each request would be 57 KB on the
        # wire, and the choice is 672 bytes.
        logits = read @ model.language_model.lm_head.weight[self._rows].T
        chosen, log_probs = choose_tokens(logits, samplings)
        version = torch.full_like(log_probs, model.weight_version)
        return list(torch.stack([chosen.float(), log_probs, version], dim=1))


def _sampling(values: Any) -> Sampling:
    return Sampling(**values) if values else Sampling()


@register_processor
class ServedOpenVlaOft(ServedPrismatic):
    """A bidirectional trunk behind two towers and a proprio projector."""

    is_pooling_model = True
    attn_type = "encoder_only"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        policy: OpenVlaOftConfig = policy_config(vllm_config, OpenVlaOftConfig)
        super().__init__(vllm_config, policy, policy.proprio, prefix)
        self._placeholder_id = policy.llm.pad_token_id
        self.pooler = ActionPooler(policy, self)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Sequence[Tensor] | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embed words; placeholders are exactly zero; features replace their positions."""
        embeddings: Tensor = self.language_model.model.embed_input_ids(input_ids)
        # The features' positions come after: they are written over whatever the ids embed to.
        embeddings = embeddings.masked_fill((input_ids == self._placeholder_id)[:, None], 0.0)
        if not multimodal_embeddings:
            return embeddings
        assert is_multimodal is not None
        embedded = embeddings.clone()
        embedded[is_multimodal.to(embeddings.device)] = torch.cat(list(multimodal_embeddings)).to(
            embeddings.dtype
        )
        return embedded
