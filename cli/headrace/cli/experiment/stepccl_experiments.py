"""DistTrain's figure 22: what StepCCL gains by exchanging the slices' rows in pieces while products of other pieces are computed.

A layer of the LLM has, in its forward as in the backward for its inputs, two all-gathers in front of products and two
reduce-scatters behind them. With n pieces the first exchange of a gather, or the last of a scatter, is alone, and the others lie
beside products: t_comm / n + (n - 1) / n max(t_comm, t_product) + t_product / n. Weight gradients and attention exchange nothing.
"""

from __future__ import annotations

from headrace.cli.experiment.disttrain_models import SEQUENCE
from headrace.cli.experiment.findings import Figure, Findings, Row
from headrace.model_shape import TransformerShape
from headrace.published_models import PUBLISHED_LLMS
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS

PUBLISHED: dict[int, Figure] = {4: (1.10, 1.17), 8: (1.15, 1.17)}
"""By slices: step of one stage of the LLM without over that with StepCCL."""
PIECES = 4
"""Of each exchange."""
_MODELS = {"Llama3-7B": "disttrain-7b", "Llama3-13B": "disttrain-13b", "Llama3-70B": "disttrain-70b"}
_BYTES = 2.0  # of a number in bfloat16
_WITHIN = 0.1


def figure_22() -> Findings:
    """Time of one stage of the LLM without over that with exchange in pieces."""
    rows = []
    for slices, published in PUBLISHED.items():
        for name, model in _MODELS.items():
            plain, overlapped, exchange = _layer_s(PUBLISHED_LLMS[model], slices, PIECES)
            rows.append(
                Row(
                    name=f"{name}, {slices} slices",
                    ours=plain / overlapped,
                    published=published,
                    unit="x",
                    within=_WITHIN,
                    detail=f"exchange takes {exchange / plain:.0%} of the layer where nothing hides it",
                )
            )
    notes = (
        f"A sequence of {SEQUENCE:,} tokens; products at half of an A800's peak, exchange at 150 GB/s in one direction.",
        f"How many pieces there were is not published: {PIECES} are assumed. That small products are slower, and putting rows "
        "in order afterwards, are not in it.",
    )
    return Findings(what="time of a stage without over that with StepCCL", rows=tuple(rows), notes=notes)


def _layer_s(shape: TransformerShape, slices: int, pieces: int) -> tuple[float, float, float]:
    """Return the seconds of one layer, forward and backward, without overlap and with it, and those of its exchange alone."""
    cluster = CLUSTERS["a800"]
    rate = cluster.flops_per_s * cluster.efficiency * slices
    matrices = 3 if shape.gated else 2
    weights = (
        shape.width * (shape.width + 2 * shape.kv_width),  # query, key, value, behind an all-gather
        shape.width * shape.width,  # the output, in front of a reduce-scatter
        (matrices - 1) * shape.width * shape.mlp,
        shape.width * shape.mlp,
    )
    products = [2.0 * SEQUENCE * number / rate for number in weights]
    one_s = (slices - 1) / slices * _BYTES * SEQUENCE * shape.width / cluster.intra_node_bytes_per_s
    exchange = 2 * len(products) * one_s
    attention = 3 * 2.0 * SEQUENCE**2 * shape.width / rate  # forward and twice that backward, causal
    alone = attention + sum(products)  # the products are for weight gradients
    plain = alone + 2 * sum(products) + exchange
    overlapped = alone + 2 * sum(_in_pieces(one_s, product, pieces) for product in products)
    return plain, overlapped, exchange


def _in_pieces(exchange_s: float, product_s: float, pieces: int) -> float:
    beside = (pieces - 1) / pieces * max(exchange_s, product_s)
    return exchange_s / pieces + beside + product_s / pieces
