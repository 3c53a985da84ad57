"""The models of DistTrain's evaluation (table 1 and section 8) as demands, by counted operations.

Llama 3 in three sizes on sequences of 8,192 tokens, ViT-Huge in front, and behind it a generator. The layers of DiT-XL, with the
weights of Stable Diffusion 2.1, stand in for its U-Net: both take about 0.9e12 operations for the forward of 512 x 512 pixels.
The images of a sample are drawn: LAION-400M's numbers of images in a sequence are published as a picture only. An image of
512 x 512 is 1,024 positions of the encoder, one of 1024 x 1024 in the generator 4,096. Encoder and generator run with activation
checkpointing: DistTrain trains each on one GPU, which a pipeline's depth of microbatches would not fit without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.model_shape import TransformerShape
from headrace.plan import GENERATOR, LLM
from headrace.published_models import PUBLISHED_MODELS
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.cost_model.kept_bytes import Keeping, kept_bytes
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS, Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand

SEQUENCE = 8192
IMAGE_POSITIONS = 1024
MEAN_IMAGES, MOST_IMAGES = 3.0, 7
NUM_SAMPLES = 512
WIDTHS = (1, 2, 4, 8)
WEIGHTS_OF_SD = 1e9

MODELS: Mapping[str, int] = {"MLLM-9B": 1024, "MLLM-15B": 1024, "MLLM-72B": 4096}
"""By name: the positions of a generated image."""
MEGATRON_STAGES = {"MLLM-9B": 1, "MLLM-15B": 2, "MLLM-72B": 10}
"""Stages of the LLM that DistTrain gives Megatron-LM (8.1), with 8 slices, and one stage each of encoder and generator."""


def demand_of(model: str, gpus: int, global_batch: int, frozen: tuple[str, ...] = ()) -> Demand:
    """A model on nodes of 8 A800, of which the last one need not be full; projectors learn, whatever is frozen."""
    shape, generated = PUBLISHED_MODELS[model.lower()], MODELS[model]
    assert shape.generator is not None
    node = CLUSTERS["a800"]
    cluster = node.of_gpus(gpus - gpus % node.gpus_per_node)
    rng = np.random.default_rng(5)
    images = np.minimum(rng.geometric(1 / MEAN_IMAGES, NUM_SAMPLES), MOST_IMAGES).astype(np.float64)
    text = np.full(NUM_SAMPLES, float(SEQUENCE))
    units = (
        counted_unit("encoder", shape.vision, images * IMAGE_POSITIONS, IMAGE_POSITIONS, cluster, frozen),
        counted_unit(LLM, shape.llm, text, SEQUENCE, cluster, frozen, checkpointing=False),
        counted_unit(GENERATOR, shape.generator, images * generated, generated, cluster, frozen, parameters=WEIGHTS_OF_SD),
    )
    return Demand(units=units, cluster=cluster, global_batch=global_batch)


def counted_unit(
    name: str,
    shape: TransformerShape,
    positions: Floats,
    segment: int,
    cluster: Cluster,
    frozen: tuple[str, ...] = (),
    *,
    parameters: float | None = None,
    checkpointing: bool = True,
) -> UnitDemand:
    """A stack on (n,) positions of each sample, which attend to each other in segments of so many: causally in an LLM.

    A layer's slices sum their outputs by rings, twice in each of the forward, its re-run and the gradients of inputs. The demand
    counts a backward as a multiple of the forward, so the forward has the sums' share of both.
    """
    attention = 4.0 * segment * shape.width * (0.5 if name == LLM else 1.0)
    operations = positions * (shape.layers * (2.0 * shape.layer_weights + attention) + 2.0 * shape.width * shape.vocab)
    is_frozen = name in frozen
    has_backward = not is_frozen or name in (LLM, GENERATOR)
    factor = has_backward * (2.0 - is_frozen + checkpointing)
    sums = 2.0 + has_backward * (2.0 + 2.0 * checkpointing)
    seconds, kept = {}, {}
    for tp in WIDTHS:
        summed = shape.layers * sums / (1.0 + factor) * 2.0 * (tp - 1) / tp * 2.0 * shape.width * positions
        seconds[tp] = operations / tp / (cluster.flops_per_s * cluster.efficiency) + summed / cluster.intra_node_bytes_per_s
        kept[tp] = positions * kept_bytes(shape, Keeping(tp=tp, frozen=is_frozen, checkpointing=checkpointing))
    return UnitDemand(
        name=name,
        layers=shape.layers,
        parameters=parameters or float(shape.layers * shape.layer_weights + 2 * shape.width * shape.vocab),
        trained_share=0.0 if is_frozen else 1.0,
        backward_factor=factor,
        forward_s=seconds,
        kept_bytes=kept,
        sent_bytes=positions * 2.0 * shape.width,
    )
