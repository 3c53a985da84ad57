"""A diffusion transformer (Peebles and Xie 2023) that learns to make a sample's images from noise, conditioned on the LLM.

It is trained with rectified flow (Liu et al. 2022; Lipman et al. 2022): on the straight path x_t = (1 - t) image + t noise it
predicts the velocity noise - image. A row is a merged token: the merge * merge patches of one placeholder in the LLM, `values`
numbers in all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model_shape import TransformerShape
from headrace.spec import ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative, places
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import encoder_blocks, layer_norm
from headrace.trainer.models.noise import normal, numbers, uniform
from headrace.trainer.models.rotary import Rotation, rotation
from headrace.trainer.models.vision_encoder import centred, patch_positions

_THETA = 10_000.0  # Su et al. 2021, for positions; for times as in Peebles and Xie
_TIME_SCALE = 1000.0  # spreads times from 0 to 1 over the range of diffusion steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Inputs and targets of rectified flow for the L image tokens of a microbatch."""

    noisy: Tensor
    """(L, values) float32: (1 - time) * image + time * noise."""
    time: Tensor
    """(L,) float32 from 0, the image, to 1, the noise; the same for all tokens of an image."""
    velocity: Tensor
    """(L, values) float32, what the generator is to predict: noise - image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratorLayout:
    """Where the L image tokens of a microbatch lie, and what is drawn for them."""

    positions: Tensor
    """(L, 2) int64: row and column of each token in its image."""
    segments: Segments
    """One for each image."""
    time: Tensor
    """(L,) float32: the time of each token's image (see `Flow`)."""
    noise_keys: Tensor
    """(L,) int64: the key of each token's noise."""


class Generator(nn.Module):
    """Predicts the velocities of noisy image tokens from a condition (L, width) for each. A token sees its own image only."""

    def __init__(self, shape: TransformerShape, image: ImageSpec, *, seed: int = 0) -> None:
        """`seed`: the job's, from which times and noise are drawn."""
        super().__init__()
        self.seed = seed
        self.group = image.merge**2
        self.merge = image.merge
        self.width = shape.width
        self.head_dim = shape.width // shape.heads
        self.values = 3 * self.group * image.patch**2
        self.embed = nn.Linear(self.values, shape.width)
        self.time = nn.Linear(shape.width, shape.width)
        self.layers = encoder_blocks(shape)
        self.norm = layer_norm(shape.width)
        self.head = nn.Linear(shape.width, self.values)

    def forward(self, patches: Tensor, layout: GeneratorLayout, conditions: Tensor) -> Tensor:
        """Return the loss summed over all image tokens, a float32 scalar. There must be at least one image."""
        flow = self.flow(patches, layout)
        x = self.embed_inputs(flow, conditions)
        layer_args = self.layer_args(layout)
        for layer in self.layers:
            x = layer(x, *layer_args)
        return self.loss(x, flow)

    def token_counts(self, lengths: Tensor) -> Tensor:
        """Return the (I,) numbers of tokens of images with these (I,) numbers of patches."""
        return lengths // self.group

    def num_rows(self, image_cu_seqlens: Tensor) -> int:
        """Return the number of rows, the image tokens, in the hidden states between layers."""
        return int(image_cu_seqlens[-1]) // self.group

    def layout(self, microbatch: PackedMicrobatch) -> GeneratorLayout:
        """Return the layout of the images of a microbatch, with what is drawn for them, on the host.

        Times and noise follow from the job's seed, the sample's id and the place in the sample alone: every process draws the
        same, in any microbatch and as often as it likes.
        """
        lengths, images = self.token_counts(microbatch.image_cu_seqlens.diff()), microbatch.images_per_sample
        sample_keys = torch.tensor([self._key(sample) for sample in microbatch.sample_ids.tolist()], dtype=torch.int64)
        time_keys = torch.repeat_interleave(sample_keys, images)
        of_sample = torch.repeat_interleave(torch.arange(len(images)), images)
        tokens = torch.zeros(len(images), dtype=torch.int64).index_add_(0, of_sample, lengths.long())
        noise_keys = torch.repeat_interleave(sample_keys, tokens)
        grids = microbatch.image_grids // torch.tensor([1, self.merge, self.merge])
        return GeneratorLayout(
            positions=patch_positions(grids, merge=1),
            segments=Segments.of(cumulative(lengths)),
            time=torch.repeat_interleave(uniform(numbers(~time_keys, places(images))), lengths),
            noise_keys=numbers(noise_keys, places(tokens)),
        )

    def _key(self, sample: int) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, signed=True)

    def flow(self, patches: Tensor, layout: GeneratorLayout) -> Flow:
        """Draw the noise of all images, and mix them with it. `patches` and `layout` are on the same device."""
        image = centred(patches, torch.float32).view(-1, self.values)
        noise = normal(layout.noise_keys, self.values)
        return Flow(noisy=torch.lerp(image, noise, layout.time[:, None]), time=layout.time, velocity=noise - image)

    def embed_inputs(self, flow: Flow, conditions: Tensor) -> Tensor:
        """Return the input of the first layer: (L, width)."""
        dtype = self.embed.weight.dtype
        angles = rotation(_TIME_SCALE * flow.time[:, None], self.width, theta=_THETA)
        waves = torch.cat((angles.cos, angles.sin), dim=-1).squeeze(1)
        x: Tensor = self.embed(flow.noisy.to(dtype)) + self.time(waves.to(dtype)) + conditions
        return x.to(dtype)

    def layer_args(self, layout: GeneratorLayout) -> tuple[Rotation, Segments]:
        """Return the rotary angles and segments, one per image, that every layer takes."""
        return rotation(layout.positions, self.head_dim, theta=_THETA), layout.segments

    def loss(self, x: Tensor, flow: Flow) -> Tensor:
        """Return the loss, a scalar, from the last layer's output x (L, width).

        It is the squared error of the velocity, averaged over a token's values and summed over tokens.
        """
        velocity: Tensor = self.head(self.norm(x))
        return functional.mse_loss(velocity.float(), flow.velocity, reduction="sum") / self.values
