"""Small models of every family that sees, with random weights, as folders that `load_model` reads; and what transformers itself computes for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from tether.core.images import Image, with_placeholders
from tether.core.protocols import ContextReset, PromptTokens, Sampling
from tether.core.types import Completion
from tether.models.catalog import shipped_folder
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
PARTS = "{% for part in message.content %}{% if part.type == 'image' %}%s{% else %}{{ part.text }}{% endif %}{% endfor %}"
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + PARTS.replace("%s", "<|vision_start|><|image_pad|><|vision_end|>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOL_TEMPLATE = (  # as SmolVLM's: it takes contents as lists only, and a space depends on what comes first
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}"
    + PARTS.replace("%s", "<image>")
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
}


def write_model(family: str, folder: Path, **text: int) -> Path:
    """A model of a family in a folder, once; `text` changes sizes of its language part."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(shipped_folder("tiny"))
    make = _qwen if family.startswith("qwen") else _idefics
    model, image_processor = make(family, tokenizer, TEXT | text)
    for part in (model.float().eval(), tokenizer, image_processor):
        part.save_pretrained(folder)
    return folder


def _qwen(family: str, tokenizer: Any, sizes: dict[str, Any]) -> tuple[Any, Any]:
    special = ("image_pad", "video_pad", "vision_start", "vision_end")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in special]})
    tokenizer.chat_template = QWEN_TEMPLATE
    ids = {f"{name.replace('_pad', '')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in special}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**sizes, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "rope_parameters": rotary}
    if family == "qwen2_5_vl":
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config={**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}, tie_word_embeddings=True, **ids
        )
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif family == "qwen2_vl":
        tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
        model = transformers.Qwen2VLForConditionalGeneration(
            transformers.Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
        )
    else:
        rotary["mrope_interleaved"] = True
        config = transformers.Qwen3VLConfig(
            text_config={**text, "head_dim": 16},
            vision_config={**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            tie_word_embeddings=True,
            **ids,
        )
        model = transformers.Qwen3VLForConditionalGeneration(config)
    return model, transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=64 * 64)


def _idefics(family: str, tokenizer: Any, sizes: dict[str, Any]) -> tuple[Any, Any]:
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token, tokenizer.chat_template = "<end_of_utterance>", SMOL_TEMPLATE
    prefix, splits = ("Idefics3", False) if family == "idefics3" else ("SmolVLM", True)
    end = tokenizer.eos_token_id
    config = getattr(transformers, f"{prefix}Config")(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=end,
        text_config={**sizes, "model_type": "llama", "vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    processor = getattr(transformers, f"{prefix}ImageProcessorPil")
    return model, processor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=splits)


def some_pictures() -> list[Image]:
    """Eight, of several sizes."""
    rng = np.random.default_rng(0)
    return [Image.of(rng.integers(0, 255, (8 * int(rng.integers(2, 8)), 8 * int(rng.integers(2, 8)), 3), dtype=np.uint8)) for _ in range(8)]


class Talk:
    """Some turns; each shows a picture, later ones in the middle of a text."""

    closing_tags = ("</answer>",)

    def __init__(self, chat: ChatFormat, pictures: list[Image], group: int, member: int, most_turns: int = 3) -> None:
        self.most_turns = most_turns
        self.chat, self.pictures, self.prefix_key, self.member = chat, pictures, group, member
        self.uniforms = np.random.default_rng([group, member])
        self.ids: list[int] = []
        self.sampled: list[tuple[int, float]] = []
        """Place and log-prob of every sampled token."""
        self.images: list[Image] = []
        self.turns = 0

    def begin(self) -> PromptTokens:
        self.images.append(self.pictures[self.prefix_key])
        return ContextReset(self._fed(self.chat.first_prompt("Rules.", f"{self.images[0].marker}\n" + "word " * self.prefix_key)))

    def receive(self, completion: Completion) -> PromptTokens:
        self.sampled += [(len(self.ids) + n, value) for n, value in enumerate(completion.logprobs)]
        self.ids += completion.token_ids
        self.turns += 1
        if self.turns == self.most_turns:
            return None
        self.images.append(self.pictures[(3 * self.prefix_key + self.member + self.turns) % 8])
        return self._fed(self.chat.next_prompt("ok " * self.member + self.images[-1].marker + " go", completion.token_ids))

    def _fed(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        self.ids += ids
        return ids


def play(
    policy: Policy, pictures: list[Image], temperature: float = 0.7, sizes: tuple[int, int, int] = (3, 3, 7), **options: Any
) -> list[Talk]:
    """Talks of two members a group, by an engine with these options; `sizes`: groups, turns, and tokens of a turn."""
    assert policy.tokenizer is not None
    chat = ChatFormat(policy.tokenizer, policy.end_of_turn_ids, policy.vision)
    groups, turns, max_tokens = sizes
    talks = [Talk(chat, pictures, group, member, turns) for group in range(groups) for member in range(2)]
    NativeEngine(policy, max_rows=4, **options).run(talks, Sampling(temperature=temperature, max_tokens=max_tokens))
    return talks


@torch.no_grad()
def logprobs_by_transformers(policy: Policy, ids: Sequence[int], images: Sequence[Image], temperature: float = 1.0) -> Tensor:
    """[T, V]: what the module itself says of a text with images, pixels and all, in one pass."""
    vision, module = policy.vision, policy.module
    assert vision is not None
    ids_1T = torch.tensor([with_placeholders(ids, vision.placeholder_id)], device=policy.device)
    nested = not str(module.config.model_type).startswith("qwen")
    pixels = [image.pixels.copy() for image in images]
    each = [vision.image_processor(images=[[one]] if nested else [one], return_tensors="pt") for one in pixels]
    dim = 1 if nested else 0
    names = ("pixel_values", "pixel_attention_mask") if nested else ("pixel_values", "image_grid_thw")
    inputs = {name: torch.cat([dict(one)[name] for one in each], dim=dim).to(policy.device) for name in names} if each else {}
    if not nested:
        inputs["mm_token_type_ids"] = (ids_1T == vision.placeholder_id).int()
        module.base_model.rope_deltas = None
    logits: Tensor = module(input_ids=ids_1T, use_cache=False, **inputs).logits[0]
    return torch.log_softmax(logits.float() / temperature, dim=-1).cpu()
