"""`Policy`: one handle on a model, made once and shared by learner, engine, scorer, reference and critic.

A causal language model is used in two halves: features for every position, logits only for the positions that are wanted. The vocabulary is
the widest thing in a small model: logits for prompt tokens that nothing reads would take most of the time and memory of a forward pass.
Some architectures do more than a matrix product after the last layer (scaling, soft caps): there the features are the logits, and the
second half does nothing.

Everything about a model that has to be found out (whether the halves reproduce the logits, whether texts may share a row, whether
the fast path computes the same, which decoder and which scorer fit) is probed when it is first asked for and remembered here. A result holds
for a device and a number type: where the learner changes what the model computes in, the probe is run again. What uses a model stands outside:
`decoder_for`, `scorer_for`, and `fast_path_report`, which says what was found, and why something slow is used.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.core.images import IMAGE_IDS
from tether.models.fast.backbone import LlamaBackbone, plain_causal
from tether.models.fast.layers import UnsupportedLayout, find_layers, language_part, projected
from tether.models.probing import (
    HALF_TYPES,
    disagreement,
    disagreement_with,
    evaluating,
    float32_disagreement,
    float32_parts,
    probe_ids,
    probe_positions,
    reason_against,
)
from tether.models.vision import PlacesOf, Vision, vision_of

HEAD_TOKENS = 4
PACKED_LENGTHS = ((4, 3), (5, 2))
"""Two rows of two texts each: as many tokens in both, the border elsewhere."""
SCORER_PROBES = ("report", "shared prefix", "cache")
"""Names of the probes that decide how texts are scored (models/scoring/local.py), and of the report on all (models/fast_path.py)."""
UNLIMITED = 2**31
"""Positions of a model that names no limit."""

T = TypeVar("T")


class Divided(Protocol):
    """A model of which each of several ranks holds a part (training/distributed/fsdp.py)."""

    dtype: torch.dtype
    """What it computes in; the parts may be held in more."""

    def in_step(self, work: Callable[[], T]) -> T:
        """What `work` returns, while all ranks make equally many passes through the model; all ranks call it at the same time."""
        ...

    def gathered(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """The weights by name, whole, in host memory on the first rank; None on the others. All ranks call it at the same time."""
        ...

    def load(self, weights: Mapping[str, Tensor] | None) -> None:
        """Take the whole weights that the first rank gives, all or some of them. All ranks call it at the same time."""
        ...


class Policy:
    """A Hugging Face causal language model with everything that is known about it."""

    def __init__(
        self, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, max_positions: int | None = None
    ) -> None:
        """`max_positions`: how many positions the run may use; None takes all that the model has."""
        self.module = module
        self.tokenizer = tokenizer
        self._wanted_positions = max_positions
        self.vision: Vision | None = vision_of(module, tokenizer)
        """How the model reads images; None where it reads text only."""
        self._head: Any = module.get_output_embeddings()
        self._head_found: str | None = None
        self._found: dict[tuple[str, torch.device, torch.dtype], Any] = {}
        self._known: dict[str, Any] = {}
        """What is known without a probe: see `twin`."""
        self.divided: Divided | None = None
        """Where the module's weights are divided among ranks and no rank holds all of them; the module computes inside `in_step` alone."""

    # ------------------------------------------------------------------------------------------------------ what it is

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.module.dtype if self.divided is None else self.divided.dtype

    @property
    def config(self) -> Any:
        """The config of the language model; of a model with images, its text part."""
        return self.module.config.get_text_config()

    @property
    def places(self) -> PlacesOf | None:
        """`Vision.places` of a model whose patches have places in time, height and width; None where positions are those of the tokens."""
        return self.vision.places if self.vision is not None and self.vision.sections else None

    @property
    def placeholder_id(self) -> int:
        """What records have in the place of a patch; 0 for a model that reads text only."""
        return 0 if self.vision is None else self.vision.placeholder_id

    @property
    def model_type(self) -> str:
        return str(self.module.config.model_type)

    @property
    def max_positions(self) -> int:
        """How long a text may get: what the run asked for, within what the model has."""
        own = model_positions(self.module)
        return own if self._wanted_positions is None else min(own, self._wanted_positions)

    @property
    def width(self) -> int:
        """D, where the head is separable."""
        return int(self._head.weight.shape[1])

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's, then those of the model's generation config, which may be a list (Llama 3, Gemma, Phi)."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        more = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        found = [own, *(more if isinstance(more, list | tuple) else [more])]
        return tuple(dict.fromkeys(int(token) for token in found if token is not None))

    # ------------------------------------------------------------------------------------------------------ what it computes

    def in_step(self, work: Callable[[], T]) -> T:
        """What `work` returns, which passes through the model without gradient. Of a divided model all ranks call this at the same time, each
        with its own work or with none; whoever has fewer passes takes part in those of the others."""
        return work() if self.divided is None else self.divided.in_step(work)

    def features(self, **inputs: Any) -> Tensor:
        """[B, T, D] (or [B, T, V] for a model whose head is not separable) for the model's usual inputs."""
        output: Tensor
        if self.vision is not None:
            inputs = self._with_images(**inputs)
        if self.separable_head:
            output = language_part(self.module)(**inputs).last_hidden_state
        else:
            output = self.module(**inputs).logits
        return output

    def _with_images(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> dict[str, Any]:
        """The inputs of the language part: images embedded, places in time, height and width where the model has them. Places that are not
        given are those of texts that each begin their row."""
        assert self.vision is not None
        embedded = self.vision.embed(input_ids)
        if self.places is not None and position_ids is None:
            found = [self.places(row)[0] for row in input_ids.tolist()]
            position_ids = torch.from_numpy(np.stack(found, axis=1)).to(input_ids.device)
        if embedded.deep:
            is_image = input_ids >= IMAGE_IDS
            inputs |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": [part[is_image] for part in embedded.deep]}
        return {"inputs_embeds": embedded.states_SD, "position_ids": position_ids, **inputs}

    def logits(self, features: Tensor) -> Tensor:
        """[..., V] from any selection of features."""
        return projected(self._head, features) if self.separable_head else features

    # ------------------------------------------------------------------------------------------------------ what was probed

    def once(self, name: str, probe: Callable[[], T]) -> T:
        """The result of a probe, which is run when it is first asked for, on the present device and number type, without dropout."""
        if name in self._known:
            return cast(T, self._known[name])
        key = name, self.device, self.dtype
        if key not in self._found:
            # Probes change how the module attends or what it computes in while they run. `features` needs to know about the head in there,
            # so the head is probed before.
            _ = self.separable_head
            with evaluating(self.module):
                self._found[key] = probe()
        return cast(T, self._found[key])

    def twin(self, module: PreTrainedModel, divided: Divided | None = None) -> "Policy":
        """A policy over a module of the same kind whose weights are in place only during a call of the module, so that it cannot be probed:
        what was found on this policy holds for it. Layers are computed inside calls of their modules. `divided`: as the attribute."""
        other = Policy(module, self.tokenizer, max_positions=self._wanted_positions)
        other.divided = divided
        other._head_found = self.head_reason
        backbone = None
        if self.backbone is not None:
            backbone = LlamaBackbone(module, find_layers(module), self.max_positions)
            backbone.through_modules = True
        other._known = {"backbone": (backbone, self.backbone_reason), "packing": self.packing_reason}
        if divided is not None:  # it also scores: make the report of this policy before
            other._known |= {name: found for (name, *_), found in self._found.items() if name in SCORER_PROBES}
        return other

    @property
    def separable_head(self) -> bool:
        """Whether `features` are the last hidden states; they are the logits otherwise."""
        return not self.head_reason

    @property
    def head_reason(self) -> str:
        """Why the head is not separable; "" where it is."""
        if self._head_found is None:  # a matter of the architecture, not of device and number type
            with evaluating(self.module):
                self._head_found = reason_against(self._probe_head)
        return self._head_found

    @torch.inference_mode()
    def _probe_head(self) -> str:
        """The two halves must give the module's own logits, to the last bit: they are the same operations."""
        if self._head is None:
            return "the model names no output embeddings"
        ids = probe_ids(self.module, HEAD_TOKENS)
        whole = self.module(input_ids=ids, use_cache=False).logits
        halves = self._head(language_part(self.module)(input_ids=ids, use_cache=False).last_hidden_state)
        same = whole.shape == halves.shape and torch.equal(whole, halves)
        return "" if same else "logits are more than one product of the last hidden states with the head"

    @property
    def linear_head(self) -> nn.Linear | None:
        """The head, where logits are one matrix product of the features with its weights."""
        is_plain = self.separable_head and type(self._head) is nn.Linear and self._head.weight.is_floating_point()
        return self._head if is_plain else None

    @property
    def backbone(self) -> LlamaBackbone | None:
        """The model's forward pass over flat tokens, which needs no padding; None for models that have none."""
        return self._backbone[0]

    @property
    def backbone_reason(self) -> str:
        """Why there is no backbone; "" where there is one."""
        return self._backbone[1]

    @property
    def _backbone(self) -> tuple[LlamaBackbone | None, str]:
        if not self.separable_head:
            return None, self.head_reason
        return self.once("backbone", lambda: probe_backbone(self.module, self.max_positions, self.vision))

    @property
    def supports_packing(self) -> bool:
        """Whether texts that share a row, separated by positions that start again, get the logits they get alone."""
        return not self.packing_reason

    @property
    def packing_reason(self) -> str:
        """Why they do not; "" where they do."""
        if self.places is not None:
            return "images have places of their own"
        return self.once("packing", lambda: reason_against(self._probe_packing))

    @torch.inference_mode()
    def _probe_packing(self) -> str:
        """Second texts must not change with the first ones of their rows, to the last bits; against texts alone there is rounding."""
        first, second = PACKED_LENGTHS
        lengths, width = [*first, *second], sum(first)
        ids_1T = probe_ids(self.module, 2 * width)
        positions_2W = torch.cat([torch.arange(length, device=ids_1T.device) for length in lengths]).view(2, width)
        is_first_2W = torch.arange(width, device=ids_1T.device) < torch.tensor([[first[0]], [second[0]]], device=ids_1T.device)
        ids_2W = ids_1T.view(2, width)
        others_2W = torch.where(is_first_2W, ids_2W.flip(0), ids_2W)
        packed, with_others = (
            self.features(input_ids=ids, position_ids=positions_2W, use_cache=False).float() for ids in (ids_2W, others_2W)
        )

        def alone() -> Tensor:
            texts = ids_1T.split(lengths, dim=1)
            return torch.cat([self.features(input_ids=text, use_cache=False) for text in texts], dim=1).view_as(packed)

        moved = float((packed - with_others).abs()[~is_first_2W].max()) / max(1.0, float(alone().abs().max()))
        if moved > 1e-5:
            return "texts that share a row see each other"
        return disagreement_with(self.module, packed, alone, self.dtype)


def model_positions(model: PreTrainedModel) -> int:
    """How long a text may get: the model's positions, or its attention window, inside which full attention is the same thing."""
    config = model.config.get_text_config()
    positions = int(getattr(config, "max_position_embeddings", 0) or UNLIMITED)
    window = getattr(config, "sliding_window", None)
    return min(positions, int(window)) if window and getattr(config, "use_sliding_window", True) else positions


@torch.no_grad()
def probe_backbone(
    model: PreTrainedModel, max_positions: int | None = None, vision: Vision | None = None
) -> tuple[LlamaBackbone | None, str]:
    """The family's forward pass over a model, or None and the reason why the model is computed by its own code."""
    try:
        layers = find_layers(model)
    except UnsupportedLayout as error:
        return None, str(error)
    backbone = LlamaBackbone(model, layers, max_positions)
    backbone.vision = vision
    with evaluating(model):
        reason = reason_against(lambda: _disagreement(backbone))
    return (None, reason) if reason else (backbone, "")


def _disagreement(backbone: LlamaBackbone) -> str:
    """Why the family's forward pass does not compute what the module computes; "" where it does."""
    model = backbone.model
    if model.device.type == "cuda":
        from tether.models.fast.kernels.warm_up import warm_up

        warm_up(backbone)
    positions_T = torch.tensor(probe_positions(backbone.num_positions), device=model.device)
    ids_1T = probe_ids(model, len(positions_T))
    # The mask says that this is one text: without it transformers takes a jump of the positions for the border of two texts in one row.
    one_text = {"position_ids": positions_T[None], "attention_mask": torch.ones_like(ids_1T), "use_cache": False}

    def by_module() -> Tensor:
        features_TD: Tensor = language_part(model)(input_ids=ids_1T, **one_text).last_hidden_state[0]
        return features_TD

    def in_float32() -> Tensor:
        with float32_parts(language_part(model)):
            return by_module()

    attend = plain_causal(backbone)
    if model.dtype in HALF_TYPES:
        exact_TD = in_float32()
        reason = float32_disagreement(backbone.float32_features(ids_1T[0], positions_T, attend), exact_TD)
        for few_by_kernels in sorted({False, backbone.few_by_kernels}):
            backbone.few_by_kernels = few_by_kernels
            reason = reason or disagreement(backbone.features(ids_1T[0], positions_T, attend), by_module(), lambda: exact_TD, model.dtype)
        return reason
    return float32_disagreement(backbone.features(ids_1T[0], positions_T, attend), by_module())
