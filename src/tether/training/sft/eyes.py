"""`tether warmstart --eyes`: `tiny` learns to see; the recipe of `tiny-vl`.

The layers over text are those of `tiny`, in the shape of Qwen2.5-VL's: positions in time, height and width, which for text are the same numbers,
and biases of zero. In front of them stands a new tower, in which one token is one cell of a grid in its default size.

1. The tower learns words: for the picture of a cell, the embedding of the symbol by which `tiny` knows it. That takes a minute on one core, and
   what comes out of it is close to what the layers can read.
2. Experts play both grids in pictures, and FrozenLake also in text, so that nothing is forgotten; lessons as in the recipe of `tiny`. The tower
   stays as it is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from tether.core.images import Image
from tether.core.protocols import Env
from tether.core.seeding import derive_seed, seed_everything
from tether.envs.registry import make_env
from tether.models.catalog import TRAINED_WORDING
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.training.sft.recipe import Progress, teach
from tether.training.sft.settings import EyesSettings

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWN = (("frozen_lake", "image"), ("sokoban", "image"), ("frozen_lake", "image"), ("frozen_lake", "grid"))
"""Turn by turn."""
WORD_IMAGES, WORD_RATE = 24, 3e-3
"""Pictures of an update of the tower, and its learning rate at its highest."""


def give_eyes(settings: EyesSettings, out: Path, device: str, progress: Progress) -> None:
    """Make the model and write it to `out`."""
    seed_everything(derive_seed("warmstart", "eyes", settings.seed))
    model, tokenizer = sighted(settings)
    model.to(device)
    policy = Policy(model, tokenizer)
    learn_words(policy, settings, progress)
    envs: Sequence[Env] = [make_env(name, instructions=TRAINED_WORDING["tiny"], observation=shown) for name, shown in SHOWN]
    chat = ChatFormat(tokenizer, policy.end_of_turn_ids, policy.vision)
    teach(policy, chat, envs, settings, (settings.skill, settings.habit), progress)
    model.to(torch.bfloat16)
    for part in (model, tokenizer, model.image_processor):
        part.save_pretrained(out)


def learn_words(policy: Policy, settings: EyesSettings, progress: Progress) -> None:
    """Teach the tower the embeddings of the symbols that it sees; it is frozen then."""
    assert policy.vision is not None
    assert policy.tokenizer is not None
    embedding: Any = policy.module.get_input_embeddings()
    embedding_VD = embedding.weight.detach()
    envs: list[Any] = [make_env(name) for name in dict.fromkeys(name for name, _ in SHOWN)]
    parameters = [parameter for part in policy.vision.tower for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    for step in range(settings.word_steps):
        images, words = [], []
        for number in range(WORD_IMAGES):
            env = envs[number % len(envs)]
            env.reset(derive_seed("warmstart-words", settings.seed, step * WORD_IMAGES + number))
            images.append(Image.of(env.state_image()))
            symbols = "".join(env.state_text().split())
            words.append([policy.tokenizer.encode(symbol, add_special_tokens=False)[0] for symbol in symbols])
        found = policy.vision.features(image.digest for image in images)
        seen_SD = torch.cat([found[image.digest][0] for image in images])
        wanted_SD = embedding_VD[torch.tensor([word for each in words for word in each], device=policy.device)]
        loss = (seen_SD - wanted_SD).square().sum(dim=-1).mean()
        for group in optimizer.param_groups:
            group["lr"] = WORD_RATE * min(1.0, (step + 1) / 20) * (1 - step / settings.word_steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress("words", step + 1, settings.word_steps, f"loss {float(loss.detach()):.4f}")
    for part in policy.vision.tower:
        part.requires_grad_(False)


def sighted(settings: EyesSettings) -> tuple[Any, PreTrainedTokenizerBase]:
    """`tiny` behind a tower that has learned nothing yet."""
    tiny, tokenizer = load_model("tiny", device="cpu")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, START, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    text = tiny.config
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    third = text.head_dim // 6
    kind: Any = Qwen2_5_VLConfig
    config = kind(
        text_config={
            "vocab_size": len(tokenizer),
            "rope_parameters": {**text.rope_parameters, "mrope_section": [text.head_dim // 2 - 2 * third, third, third]},
            **{
                name: getattr(text, name)
                for name in (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "max_position_embeddings",
                    "rms_norm_eps",
                    "bos_token_id",
                    "eos_token_id",
                    "pad_token_id",
                )
            },
        },
        vision_config={
            "depth": settings.layers,
            "hidden_size": settings.width,
            "intermediate_size": settings.hidden,
            "num_heads": settings.heads,
            "out_hidden_size": text.hidden_size,
            "patch_size": settings.patch,
            "spatial_merge_size": 2,
            "window_size": 8 * settings.patch,
            "fullatt_block_indexes": list(range(settings.layers)),
        },
        tie_word_embeddings=True,
        **ids,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    known = tiny.state_dict()
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            if name == "embed_tokens.weight":
                parameter[: len(known["model.embed_tokens.weight"])] = known["model.embed_tokens.weight"]
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(known[f"model.{name}"])
    model.image_processor = Qwen2VLImageProcessorPil(
        patch_size=settings.patch, merge_size=2, min_pixels=(2 * settings.patch) ** 2, max_pixels=settings.max_pixels
    )
    return model, tokenizer
