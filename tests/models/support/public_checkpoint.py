"""Writes a tiny checkpoint in the public OpenVLA layout without any of the project's model code, and runs it plainly.

Only timm, transformers, tokenizers, peft, safetensors: what the reference code is made of. It serves as the oracle,
with FiLM in its towers as OpenVLA-OFT's code makes and keeps them: adapters first, FiLM around them.
"""

import json
import math
from pathlib import Path
from typing import Any

import public_checkpoint
import timm
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, VOCABULARY = 32, 1024
TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
OVERRIDES = {"embed_dim": 24, "depth": 3, "num_heads": 2}
DINO = ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Parts:
    """The modules of one checkpoint, straight from the libraries."""

    def __init__(
        self, seed: int, image_size: int = 28, action_dim: int = 7, proprio_dim: int = 8
    ) -> None:
        torch.manual_seed(seed)
        make = dict(pretrained=False, num_classes=0, img_size=image_size, **OVERRIDES)
        self.dino, self.siglip = (timm.create_model(name, **make).eval() for name in TOWERS)
        for block in self.dino.blocks:
            nn.init.uniform_(block.ls1.gamma, 0.5, 1.5)
            nn.init.uniform_(block.ls2.gamma, 0.5, 1.5)
        vision = 2 * OVERRIDES["embed_dim"]
        self.projector = nn.ModuleDict(
            {
                "fc1": nn.Linear(vision, 4 * vision),
                "fc2": nn.Linear(4 * vision, WIDTH),
                "fc3": nn.Linear(WIDTH, WIDTH),
            }
        )
        config = LlamaConfig(
            vocab_size=VOCABULARY + 64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, rms_norm_eps=1e-6, pad_token_id=VOCABULARY,
        )  # fmt: skip
        self.llm = LlamaForCausalLM(config).eval()
        self.proprio = nn.ModuleDict(
            {"fc1": nn.Linear(proprio_dim, WIDTH), "fc2": nn.Linear(WIDTH, WIDTH)}
        )
        self.head = nn.ModuleDict(
            {
                "norm1": nn.LayerNorm(action_dim * WIDTH), "fc1": nn.Linear(action_dim * WIDTH, WIDTH),
                "norms": nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)]),
                "linears": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]),
                "norm2": nn.LayerNorm(WIDTH), "fc2": nn.Linear(WIDTH, action_dim),
            }
        )  # fmt: skip
        self.noisy = nn.ModuleDict({"fc1": nn.Linear(1, WIDTH), "fc2": nn.Linear(WIDTH, WIDTH)})

    def tensors(self) -> dict[str, Tensor]:
        """Everything under its public name, in the public order."""
        found: dict[str, Tensor] = {}
        for prefix, module in (
            ("vision_backbone.featurizer.", self.dino),
            ("vision_backbone.fused_featurizer.", self.siglip),
            ("projector.", self.projector),
            ("language_model.", self.llm),
        ):
            for name, tensor in module.state_dict().items():
                public = name.replace("ls1.gamma", "ls1.scale_factor").replace(
                    "ls2.gamma", "ls2.scale_factor"
                )
                found[prefix + public] = tensor.contiguous()
        return found

    def patches(self, image: Tensor) -> Tensor:
        """uint8 [3, S, S] to projected patches [1, P, WIDTH]."""
        features = []
        for tower, (mean, std) in ((self.dino, DINO), (self.siglip, SIGLIP)):
            pixels = (image.float() / 255.0 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(
                std
            ).view(3, 1, 1)
            (seen,) = tower.get_intermediate_layers(pixels[None], n={len(tower.blocks) - 2})
            features.append(seen)
        hidden = torch.cat(features, dim=-1)
        gelu = nn.functional.gelu
        return self.projector["fc3"](
            gelu(self.projector["fc2"](gelu(self.projector["fc1"](hidden))))
        )

    def read(
        self,
        image_rows: list[Tensor],
        prompt: list[int],
        proprio: Tensor | None,
        num_numbers: int,
        noisy: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """OpenVLA-OFT's hidden states where the action is read, [num_numbers, WIDTH], with an
        additive mask of zeros.

        `noisy` are the numbers of a noisy chunk and its denoising step, under diffusion.
        """
        embed = self.llm.get_input_embeddings()
        words = embed(torch.tensor([prompt]))
        seen = [self.patches(image) for image in image_rows]
        placeholders, stop = torch.zeros(1, num_numbers, WIDTH), embed(torch.tensor([[2]]))
        if proprio is not None:
            seen.append(two_layers(self.proprio, proprio)[None, None])
        if noisy is not None:
            numbers, step = noisy
            half = WIDTH // 2
            angles = [
                step * math.exp(-math.log(10_000) * index / (half - 1)) for index in range(half)
            ]
            seen.append(torch.tensor([[[*map(math.sin, angles), *map(math.cos, angles)]]]))
            placeholders = two_layers(self.noisy, numbers.reshape(1, num_numbers, 1))
        sequence = torch.cat([words[:, :1], *seen, words[:, 1:], placeholders, stop], dim=1)
        length = sequence.shape[1]
        self.llm.set_attn_implementation("eager")
        hidden = self.llm.model(
            inputs_embeds=sequence, attention_mask=torch.zeros(1, 1, length, length)
        )[0]
        self.llm.set_attn_implementation("sdpa")
        first = length - 1 - num_numbers - 1
        return hidden[0, first : first + num_numbers]

    def regress(self, hidden: Tensor, action_dim: int) -> Tensor:
        """The L1 head on hidden states [H * D, WIDTH]: [H, D]."""
        x = hidden.reshape(-1, action_dim * WIDTH)
        head = self.head
        x = torch.relu(head["fc1"](head["norm1"](x)))
        for norm, linear in zip(head["norms"], head["linears"], strict=True):
            x = x + torch.relu(linear(norm(x)))
        return head["fc2"](head["norm2"](x))

    def write_parts(self, folder: Path, *, diffusion: bool = False) -> None:
        """The head and the projectors as the reference saves them: state dicts under DDP's
        prefix.
        """
        head = {
            "layer_norm1": self.head["norm1"], "fc1": self.head["fc1"], "layer_norm2": self.head["norm2"],
            "fc2": self.head["fc2"],
            **{f"mlp_resnet_blocks.{i}.ffn.0": norm for i, norm in enumerate(self.head["norms"])},
            **{f"mlp_resnet_blocks.{i}.ffn.1": linear for i, linear in enumerate(self.head["linears"])},
        }  # fmt: skip
        inside = "noise_predictor.mlp_resnet" if diffusion else "model"
        tensors = {
            f"module.{inside}.{n}.{leaf}": t
            for n, m in head.items()
            for leaf, t in m.state_dict().items()
        }
        torch.save(tensors, folder / "action_head--150000_checkpoint.pt")
        proprio = {f"module.{name}": tensor for name, tensor in self.proprio.state_dict().items()}
        torch.save(proprio, folder / "proprio_projector--150000_checkpoint.pt")
        if diffusion:
            noisy = {f"module.{name}": tensor for name, tensor in self.noisy.state_dict().items()}
            torch.save(noisy, folder / "noisy_action_projector--150000_checkpoint.pt")

    def generate(
        self, image: Tensor, prompt: list[int], num_tokens: int
    ) -> tuple[list[int], Tensor]:
        """Greedy ids one after the other, the whole sequence anew each time, and the logits
        [num_tokens, V].
        """
        embed, ids, logits = self.llm.get_input_embeddings(), list(prompt), []
        patches = self.patches(image)
        for _ in range(num_tokens):
            words = embed(torch.tensor([ids]))
            sequence = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
            logits.append(self.llm(inputs_embeds=sequence).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
        return ids[len(prompt) :], torch.stack(logits)


def two_layers(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    """The projectors' form: linear, GELU, linear."""
    return layers["fc2"](nn.functional.gelu(layers["fc1"](x)))


def statistics(action_dim: int = 7) -> dict[str, Any]:
    """Statistics of one training set, with every field that the public files have."""
    low = [-0.1 * (1 + index) for index in range(action_dim)]
    high = [0.2 * (1 + index) for index in range(action_dim)]
    mask = [True] * (action_dim - 1) + [False]
    action = {"mean": low, "std": high, "min": [x - 1 for x in low], "max": [x + 1 for x in high]}
    proprio = {
        "mean": [0.0] * 8,
        "std": [1.0] * 8,
        "min": [-2.0] * 8,
        "max": [2.0] * 8,
        "q01": [-1.0] * 8,
        "q99": [1.0] * 8,
    }
    return {
        "action": {**action, "q01": low, "q99": high, "mask": mask},
        "proprio": proprio,
        "num_transitions": 100,
        "num_trajectories": 3,
    }


def write(
    folder: Path, parts: Parts, tokenizer_file: Path, *, shards: int = 2, image_size: int = 28
) -> None:
    """Write the folder as the public ones are: config, tokenizer, preprocessor, shards and their
    index.
    """
    folder.mkdir(parents=True)
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [image_size, image_size],
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": {"bridge_orig": statistics()},
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": VOCABULARY,
        "text_config": {
            "model_type": "llama", "pad_token_id": VOCABULARY, "torch_dtype": "float32", "vocab_size": VOCABULARY + 64,
            "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        },
        "timm_model_ids": list(TOWERS),
        "timm_override_act_layers": [None, None],
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(public_tokenizer(tokenizer_file))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"tvf_crop_params": [{"output_size": [28, 28]}] * 2})
    )
    (folder / "dataset_statistics.json").write_text(
        json.dumps({"libero_goal_no_noops": statistics()}, indent=2)
    )
    # nothing in the public layout says that the towers are tiny
    (folder / "vla_rl.json").write_text(
        json.dumps(
            {"featurizer_overrides": OVERRIDES, "fused_featurizer_overrides": OVERRIDES}, indent=2
        )
    )
    tensors = parts.tensors()
    names = list(tensors)
    size = math.ceil(len(names) / shards)
    files = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    weight_map = {}
    for index, file in enumerate(files):
        shard = {name: tensors[name] for name in names[index * size : (index + 1) * size]}
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text)


def public_tokenizer(tokenizer_file: Path) -> str:
    """A `tokenizer.json` whose pieces fill the vocabulary, with the padding token behind them, as
    in the public ones.
    """
    tokenizer = json.loads(tokenizer_file.read_text())
    pieces = tokenizer["model"]["vocab"]
    pieces |= {f"<piece {index}>": index for index in range(len(pieces), VOCABULARY)}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer["added_tokens"].append({"id": VOCABULARY, "content": "<PAD>", **flags})
    return json.dumps(tokenizer, ensure_ascii=False)


def prompt_ids(tokenizer_file: Path, instruction: str) -> list[int]:
    """The reference's prompt."""
    text = f"In: What action should the robot take to {instruction.lower()}?\nOut: "
    return Tokenizer.from_file(str(tokenizer_file)).encode(text).ids


class FilmBlock(nn.Module):
    """A block of a tower, modulated by a condition that is set beforehand."""

    condition: Tensor

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.scale, self.shift = (
            nn.Linear(public_checkpoint.WIDTH, width),
            nn.Linear(public_checkpoint.WIDTH, width),
        )

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        block: Any = self.block
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = x * (1 + self.scale(self.condition)) + self.shift(self.condition)
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def put_film(parts: public_checkpoint.Parts, rank: int) -> None:
    """Adapters on every linear layer of both towers, as if they had been trained, and FiLM around
    every block.
    """
    lora = {
        "r": rank,
        "lora_alpha": min(rank, 16),
        "lora_dropout": 0.0,
        "init_lora_weights": "gaussian",
    }
    for tower in (parts.dino, parts.siglip):
        # "all-linear" gathers last names and matches by them: `proj` also names the convolution
        # that cuts the patches
        linear = {
            name.rpartition(".")[2]
            for name, module in tower.named_modules()
            if isinstance(module, nn.Linear)
        }
        inject_adapter_in_model(LoraConfig(target_modules=sorted(linear), **lora), tower, "default")
        for name, parameter in tower.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
        for index, block in enumerate(tower.blocks):
            tower.blocks[index] = FilmBlock(block, public_checkpoint.OVERRIDES["embed_dim"])


def condition_on(parts: public_checkpoint.Parts, prompt: list[int]) -> None:
    """Tell all blocks the mean embedding of the words that are no actions: the prompt and the stop
    token.
    """
    condition = parts.llm.get_input_embeddings()(torch.tensor([*prompt, 2])).mean(dim=0)
    for tower in (parts.dino, parts.siglip):
        for block in tower.blocks:
            block.condition = condition


def film_part(parts: public_checkpoint.Parts) -> dict[str, Tensor]:
    """The state of the wrapped backbone."""
    return {
        f"vision_backbone.{name}.{key.replace('.gamma', '.scale_factor')}": tensor
        for name, tower in (("featurizer", parts.dino), ("fused_featurizer", parts.siglip))
        for key, tensor in tower.state_dict().items()
    }


def write_film_part(folder: Path, parts: public_checkpoint.Parts) -> Path:
    """The file that stands beside the main weights."""
    path = folder / "vision_backbone--100000_checkpoint.pt"
    torch.save(film_part(parts), path)
    return path
