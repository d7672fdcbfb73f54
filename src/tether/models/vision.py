"""The eyes of a model: how its images become tokens, features and positions.

Images stand among the tokens as ids of their own (core/images.py). `Vision` knows what the model makes of them:

- `expand`: the tokens of an image, as the model's own processor writes them, surrounding tokens included.
- `embed`: the states that enter the first layer, image features in the places of their patches. The features of an image are computed once and
  kept as long as the image is, unless the tower is trained.
- `places`: the rotary positions. In Qwen's models the patches of an image share the place of one token in time and differ in height and width, so
  places are three numbers and fewer than tokens; elsewhere they are the tokens' own.

Families: Qwen2-VL, Qwen2.5-VL and Qwen3-VL; Idefics3 and SmolVLM. Features come from the model's own code.

Shape legend: S tokens, D width of the model, N images.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tether.core.errors import BadInput
from tether.core.images import IMAGE_IDS, Image, ImageRun, find_runs, image_of, patch_ids
from tether.models.fast.packed_attention import PackedLengths, packed_kernel
from tether.models.probing import HALF_TYPES

Ints = npt.NDArray[np.int64]
PlacesOf = Callable[..., tuple[Ints, Ints]]
"""(ids, start) -> what `Vision.places` gives."""
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IDEFICS = ("idefics3", "smolvlm")
SIGHTED = (*QWEN, *IDEFICS)
"""The model types whose images Tether can show."""


class Embedded(NamedTuple):
    """What enters the layers."""

    states_SD: Tensor
    deep: tuple[Tensor, ...] = ()
    """[S, D] each, to be added behind the first layers; 0 where no image is. Empty where the model does not do that, or no image is there."""


class Vision:
    """Of one module; made by `vision_of`."""

    def __init__(self, module: Any, tokenizer: Any, image_processor: Any) -> None:
        config = module.config
        self.module, self.image_processor = module, image_processor
        self._tokenizer = tokenizer
        self.placeholder_id = int(config.image_token_id)
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.placeholder_id))
        """How a chat template writes an image."""
        self.never_sampled = tuple(
            sorted({int(token) for name in ("image_token_id", "video_token_id") if (token := getattr(config, name, None)) is not None})
        )
        """Tokens that mean an image that is not there."""
        self.sections: tuple[int, ...] = tuple((_rotary_settings(config.get_text_config()) or {}).get("mrope_section") or ())
        """How the rotations of a head are divided among time, height and width; empty where positions are plain."""
        self.num_deep = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        """How many layers get features of their own."""
        self._tokens: WeakKeyDictionary[Image, tuple[int, ...]] = WeakKeyDictionary()
        self._pixels: WeakKeyDictionary[Image, dict[str, Tensor]] = WeakKeyDictionary()
        self._grids: WeakKeyDictionary[Image, tuple[int, int]] = WeakKeyDictionary()
        self._features: WeakKeyDictionary[Image, tuple[Tensor, ...]] = WeakKeyDictionary()
        self._features_of: tuple[Any, ...] = ()

    # -------------------------------------------------------------------------------------------------------------- tokens

    def expand(self, image: Image) -> tuple[int, ...]:
        """The tokens of an image, what the processor puts around its patches included."""
        if image not in self._tokens:
            inputs = self._read(image)
            ids = self._tokenizer.encode(self._written(inputs), add_special_tokens=False)
            patches = iter(patch_ids(image.digest, ids.count(self.placeholder_id)))
            self._tokens[image] = tuple(next(patches) if token == self.placeholder_id else token for token in ids)
        return self._tokens[image]

    def _written(self, inputs: dict[str, Any]) -> str:
        """The text that stands for an image, with one placeholder a patch."""
        config = self.module.config
        if config.model_type in QWEN:
            grid = inputs["image_grid_thw"][0]
            return self.placeholder * int(grid.prod() // config.vision_config.spatial_merge_size**2)
        patches = self.placeholder * _tile_patches(config)
        border, whole = (
            getattr(self._tokenizer, name, None) or default
            for name, default in (("fake_image_token", "<fake_token_around_image>"), ("global_image_token", "<global-img>"))
        )
        rows, columns = (int(np.asarray(inputs.get(name, 0)).reshape(-1)[0]) for name in ("rows", "cols"))
        tiles = ["".join(f"{border}<row_{row + 1}_col_{column + 1}>{patches}" for column in range(columns)) for row in range(rows)]
        return "".join(f"{tile}\n" for tile in tiles) + ("\n" if tiles else "") + f"{border}{whole}{patches}{border}"

    def _read(self, image: Image) -> dict[str, Any]:
        """What the image processor makes of an image."""
        options = {"return_row_col_info": True} if self.module.config.model_type in IDEFICS else {}
        pixels = image.pixels.copy()  # torch warns of memory that it may not write to
        images: Any = [[pixels]] if options else [pixels]
        try:
            inputs = dict(self.image_processor(images=images, return_tensors="pt", **options))
        except ValueError as error:  # such as a side that is 200 times as long as the other
            height, width = image.pixels.shape[:2]
            raise BadInput(f"the model's processor refuses an image of {width} x {height} pixels: {error}; send another one") from error
        self._pixels[image] = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if "image_grid_thw" in inputs:
            merge = self.module.config.vision_config.spatial_merge_size
            _, height, width = inputs["image_grid_thw"][0].tolist()
            self._grids[image] = height // merge, width // merge
        return inputs

    # ------------------------------------------------------------------------------------------------------------ features

    @property
    def tower(self) -> list[nn.Module]:
        """What makes features of pixels."""
        return vision_tower(self.module)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for part in self.tower for parameter in part.parameters())

    def embed(self, ids_S: Tensor, patches: Sequence[int] | None = None) -> Embedded:
        """States of tokens, images included; any shape of ids. `patches`: those of images, in order, where the host knows them without waiting."""
        embedding: nn.Module = self.module.get_input_embeddings()
        is_image = ids_S >= IMAGE_IDS
        if patches is None:
            patches = ids_S[is_image].tolist()
        if not patches:
            return Embedded(embedding(ids_S))
        states: Tensor = embedding(torch.where(is_image, self.placeholder_id, ids_S))
        runs = find_runs(patches)
        features = self.features({run.digest for run in runs})
        parts = [[part[run.patch : run.patch + run.length] for part in features[run.digest]] for run in runs]
        placed = [torch.cat(columns).to(states.dtype) for columns in zip(*parts, strict=True)]
        wide = is_image[..., None]
        whole = states.masked_scatter(wide, placed[0])
        return Embedded(whole, tuple(torch.zeros_like(states).masked_scatter(wide, part) for part in placed[1:]))

    def features(self, digests: Iterable[str]) -> dict[str, tuple[Tensor, ...]]:
        """For every image: [patches, D], and once more for each layer that gets some of its own."""
        images = [image_of(digest) for digest in sorted(set(digests))]
        training = self.is_trained and torch.is_grad_enabled()
        parameters = [parameter for part in self.tower for parameter in part.parameters()]
        state = (parameters[0].device, parameters[0].dtype, parameters[0].data_ptr(), sum(parameter._version for parameter in parameters))
        if training or state != self._features_of:
            self._features.clear()
            self._features_of = () if training else state
        found = {image: self._features[image] for image in images if image in self._features}
        missing = [image for image in images if image not in found]
        batches: defaultdict[Any, list[Image]] = defaultdict(list)
        for image in missing:
            if image not in self._pixels:
                self._read(image)
            batches[tuple(sorted((name, tuple(value.shape)) for name, value in self._pixels[image].items()))].append(image)
        for batch in batches.values():
            with torch.inference_mode(False), torch.set_grad_enabled(training):  # in this order: leaving the mode turns gradients on
                found |= dict(zip(batch, self._through_tower(batch), strict=True))
        if not training:
            self._features.update({image: found[image] for image in missing})
        for image in missing:
            self._pixels.pop(image, None)
        return {image.digest: found[image] for image in images}

    def forget_features(self) -> None:
        """They are computed again when they are asked for."""
        self._features.clear()

    def _through_tower(self, images: Sequence[Image]) -> list[tuple[Tensor, ...]]:
        """Images whose pixels have the same shape, in one pass."""
        base: Any = self.module.base_model
        device = next(self.tower[0].parameters()).device
        pixels = [self._pixels[image] for image in images]
        inputs = {name: torch.cat([each[name] for each in pixels]).to(device) for name in pixels[0] if name not in ("rows", "cols")}
        with self._windows_at_once():
            output = base.get_image_features(**inputs)
        pooled = output.pooler_output
        width = int(self.module.config.get_text_config().hidden_size)
        whole = (pooled if isinstance(pooled, Tensor) else torch.cat(list(pooled))).reshape(-1, width)
        deep = [
            (part if isinstance(part, Tensor) else torch.cat(list(part))).reshape(-1, width)
            for part in getattr(output, "deepstack_features", None) or ()
        ]
        return list(zip(*(part.chunk(len(images)) for part in (whole, *deep)), strict=True))

    @contextmanager
    def _windows_at_once(self) -> Iterator[None]:
        """On a card, attention inside of all windows of all images is one call; the model's own code makes one for each window, thousands a pass."""
        weight = next(self.tower[0].parameters())
        config: Any = self.tower[0].config
        if self.module.config.model_type not in QWEN or not weight.is_cuda or weight.dtype not in HALF_TYPES or torch.is_grad_enabled():
            yield
            return
        usual = config._attn_implementation
        config._attn_implementation = PACKED
        try:
            yield
        finally:
            config._attn_implementation = usual

    # -------------------------------------------------------------------------------------------------------------- places

    def places(self, ids: Sequence[int], start: int = 0) -> tuple[Ints, Ints]:
        """The rotary positions [3, S] of tokens of which the first stands at `start`, and [S] where what follows each of them would stand.

        Behind a patch that is not the last one of its image that is where the image begins: from there the rest of it can go on.
        """
        size = len(ids)
        at = np.empty((3, size), dtype=np.int64)
        after = np.empty(size, dtype=np.int64)
        done, place = 0, start
        for run in [*find_runs(ids), ImageRun(size, 0, "", 0)]:
            text = np.arange(place, place + run.start - done)
            at[:, done : run.start], after[done : run.start] = text, text + 1
            place += run.start - done
            done = run.start + run.length
            if run.length:
                height, width = self._grid(run.digest)
                patch = np.arange(run.patch, run.patch + run.length)
                at[:, run.start : done] = place + np.stack([np.zeros_like(patch), patch // width, patch % width])
                after[run.start : done] = place
                if run.patch + run.length == height * width:
                    place += max(height, width)
                    after[done - 1] = place
        return at, after

    def _grid(self, digest: str) -> tuple[int, int]:
        image = image_of(digest)
        if image not in self._grids:
            self._read(image)
        return self._grids[image]


def attention_of_windows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, cu_seq_lens_q: Tensor, **__: Any
) -> tuple[Tensor, None]:
    """As transformers calls an attention that takes many texts at once: states are [1, heads, S, width], what comes back is [1, S, heads, width]."""
    query_SHD, key_SHD, value_SHD = (states[0].transpose(0, 1) for states in (query, key, value))
    lengths = tuple(end - start for start, end in pairwise(cu_seq_lens_q.tolist()))
    texts = PackedLengths(lengths, cu_seq_lens_q.int(), max(lengths), len(query_SHD))
    kernel = packed_kernel(query.device.type, query.dtype, query.shape[-1]).kernel
    return kernel.forward(query_SHD, key_SHD, value_SHD, (texts, texts), False, scaling)[0][None], None


PACKED = "flash_attention_of_windows"
"""transformers gives all windows at once to an attention with "flash" in its name."""
AttentionInterface.register(PACKED, attention_of_windows)


def vision_tower(module: Any) -> list[nn.Module]:
    """The parts of a model that make features of pixels; none of one that reads text only."""
    base: Any = module.base_model if hasattr(module.config, "vision_config") else None
    return [part for name in ("visual", "vision_model", "connector") if (part := getattr(base, name, None)) is not None]


def vision_of(module: Any, tokenizer: Any) -> Vision | None:
    """The eyes of a model; None of one that reads text only. `load_model` puts the image processor at the module."""
    image_processor = getattr(module, "image_processor", None)
    return None if image_processor is None or tokenizer is None else Vision(module, tokenizer, image_processor)


def save_processor(module: Any, folder: Path) -> None:
    """Write what other programs need to read images as this model does; nothing for one that reads text only."""
    image_processor = getattr(module, "image_processor", None)
    if image_processor is None:
        return
    image_processor.save_pretrained(folder)
    if module.config.model_type in IDEFICS:  # else vLLM and transformers take 169 patches, of Idefics3-8B, for every model
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": _tile_patches(module.config)}), encoding="utf-8")


def _tile_patches(config: Any) -> int:
    return int((config.vision_config.image_size // config.vision_config.patch_size) ** 2 / config.scale_factor**2)


def check_sighted(model_type: str) -> None:
    """Refuse an image-text model of an unknown family."""
    if model_type not in SIGHTED:
        raise BadInput(f"models of type '{model_type}' take images in a way that Tether does not know; it knows {', '.join(SIGHTED)}")


def _rotary_settings(config: Any) -> dict[str, Any] | None:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
