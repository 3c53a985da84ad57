"""The kernels of a layer, in the order in which they run, and the encoders that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.reorder_service.planning.batch import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerKernels:
    """The kernels of one pass through a layer on one GPU, each of which waits for the one before it.

    Raises ValueError for arrays of different lengths, or a kernel that takes no finite, positive time.
    """

    seconds: Floats
    """(k,) duration of each kernel."""
    communicates: NDArray[np.bool_]
    """(k,) whether it is a collective of the tensor-parallel group, during which the layer computes nothing."""

    def __post_init__(self) -> None:
        if self.seconds.ndim != 1 or self.seconds.shape != self.communicates.shape:
            raise ValueError(f"a layer's kernels need one kind each, got {self.seconds.shape} and {self.communicates.shape}")
        if not (np.isfinite(self.seconds) & (self.seconds > 0)).all():
            raise ValueError(f"a kernel takes a finite time above 0 s, got {self.seconds.tolist()}; leave it out if it is free")

    @classmethod
    def of(cls, kernels: Iterable[tuple[str, float]]) -> LayerKernels:
        """Make them from pairs of a kind, "compute" or "communicate", and seconds."""
        pairs = list(kernels)
        if unknown := {kind for kind, _ in pairs} - {"compute", "communicate"}:
            raise ValueError(f"a kernel is 'compute' or 'communicate', got {', '.join(sorted(unknown))}")
        return cls(
            seconds=np.array([seconds for _, seconds in pairs], np.float64),
            communicates=np.array([kind == "communicate" for kind, _ in pairs], np.bool_),
        )

    @property
    def total_s(self) -> float:
        """Seconds of all kernels, one after the other."""
        return float(self.seconds.sum())

    @property
    def compute_s(self) -> float:
        """Seconds of those that compute."""
        return float(self.seconds[~self.communicates].sum())

    def repeated(self, times: int) -> LayerKernels:
        """The kernels of so many layers, one after the other."""
        return LayerKernels(seconds=np.tile(self.seconds, times), communicates=np.tile(self.communicates, times))

    def scaled(self, factor: float) -> LayerKernels:
        """The same kernels, each `factor` times as long."""
        return LayerKernels(seconds=self.seconds * factor, communicates=self.communicates)


NO_KERNELS = LayerKernels.of(())
"""What a frozen layer does on the way back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """What one microbatch of the LLM takes in one layer, or in the projector, with so many tensor-parallel ranks."""

    forward: LayerKernels
    backward: LayerKernels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoder:
    """An encoder and its projector. Raises ValueError for no layer, no profile, or a negative size."""

    name: str
    layers: int
    layer: Mapping[int, Passes]
    """Profile of one layer, by the number of tensor-parallel ranks; the encoder can have these numbers and no others."""
    weights: int
    """Number of parameters, the projector's included."""
    projector: Mapping[int, Passes] = field(default_factory=dict)
    """Profile of the projector, which is the encoder's last layer; empty if its time is in that of the layers."""
    frozen: bool = False
    """Whether only the projector learns: then the layers have no backward, and keep nothing for it."""
    activation_bytes: float = 0.0
    """What all layers together keep of one microbatch until its backward, on one GPU if it had them all."""

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.layer:
            raise ValueError(f"encoder {self.name!r} needs a layer and a profile of it, got {self.layers} layers")
        if self.projector and set(self.projector) != set(self.layer):
            raise ValueError(f"encoder {self.name!r}: profile layers and projector for the same numbers of tensor-parallel ranks")
        if self.weights < 0 or self.activation_bytes < 0:
            raise ValueError(f"encoder {self.name!r} has no negative size, got {self.weights} and {self.activation_bytes}")

    def stage_kernels(self, stage: int, stages: int, tensor: int, *, backward: bool) -> LayerKernels:
        """Return the kernels of one pass of one microbatch through one of the encoder's stages.

        Layers are spread over the stages as evenly as they can; the first stages have one more where they cannot.
        """
        layers = self.layers // stages + (stage < self.layers % stages)
        parts = []
        if not (backward and self.frozen):
            layer = self.layer[tensor].backward if backward else self.layer[tensor].forward
            parts.append(layer.repeated(layers))
        if self.projector and stage == stages - 1:
            of_projector = self.projector[tensor]
            parts = [of_projector.backward, *parts] if backward else [*parts, of_projector.forward]
        return LayerKernels(
            seconds=np.concatenate([part.seconds for part in parts or [NO_KERNELS]]),
            communicates=np.concatenate([part.communicates for part in parts or [NO_KERNELS]]),
        )
