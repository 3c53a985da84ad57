"""All-reduce of gradients over the processes that hold the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_ELEMENTS = 2**23  # 32 MiB of float32 per message


def sum_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None, numbers: Sequence[float] = ()
) -> list[float]:
    """Replace every gradient by its sum over the group (None: all processes), and return the sums of `numbers`.

    A parameter that has no gradient on any process keeps none; where only some processes have one, the others count as zeros.
    Every process of the group must call this with the same parameters in the same order.
    """
    device = parameters[0].device if parameters else torch.device("cpu")
    has_gradient = [parameter.grad is not None for parameter in parameters]
    totals = torch.tensor([*numbers, *has_gradient], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=group)
    sums = totals.tolist()
    for parameter, num_ranks in zip(parameters, sums[len(numbers) :], strict=True):
        if num_ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))
    return sums[: len(numbers)]


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors into buckets of at most _BUCKET_ELEMENTS elements, a larger tensor alone.

    One message per bucket means few messages and little extra memory.
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(map(torch.numel, bucket)) + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
