"""Three slices of a stage, beside the whole: rows, vocabulary and layers that they cannot share equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.model_shape import TransformerShape
from headrace.sample import LABEL_IGNORED
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import decoder_blocks, encoder_blocks
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.loss import Targets, token_loss
from headrace.trainer.models.rotary import rotation
from headrace.trainer.pipeline.slice_collectives import gather_rows, join_rows, reduce, split_rows, sum_to_share
from headrace.trainer.pipeline.slice_rows import SliceRows
from headrace.trainer.pipeline.tensor_parallel import Slices, cut_dimension, slice_of
from headrace.trainer.pipeline.vocabulary_parallel import cut_vocabulary, sliced_token_loss
from headrace.trainer.pipeline.weight_gradients import WeightGradients
from tests.matrices import gradients_of

SLICES = 3
TIMEOUT_S = 60.0  # of a wait for each other
ROWS = (1, 2, 3, 7, 9)
"""Fewer than slices, a multiple of them, and neither."""
PIECES = {1: ROWS, 2: (4, 7, 12), 3: (9, 10, 19)}
"""Numbers of pieces, and of rows: too few for these, as many as they hold, and such that the last pieces are all padding."""
EXCHANGES = [(pieces, rows) for pieces, numbers in PIECES.items() for rows in numbers]
ROWS_OF_KINDS = 10  # enough for all numbers of pieces, and a multiple of none
WIDTH, VOCAB, TARGETS = 12, 10, 5
SHAPE = TransformerShape(layers=2, width=WIDTH, heads=3, kv_heads=3, mlp=24, gated=True)

TOLERANCE = {"biases": 5e-5, "put off": 5e-5, "bfloat16 products": 0.15, "frozen": 5e-5, "dropout": 5e-5}
"""Kinds of layers, and the most an error may be of a tensor, both as norms. Whole layers in bfloat16 are up to 0.094 off."""

Run = list[dict[str, Any]]
"""What each slice computed."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("slices")
    mp.start_processes(compute, args=(folder,), nprocs=SLICES, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(SLICES)]


def compute(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SLICES, timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD
    assert group is not None
    answer = {
        **{f"rows {rows} in {pieces}": exchanged(rank, SliceRows(rows, group, pieces)) for pieces, rows in EXCHANGES},
        **{f"layers {rows} in {pieces}": of_layers(layers(), rows, [Slices(group, pieces)]) for pieces, rows in EXCHANGES},
        **{
            f"stages {rows} in {pieces}": of_layers(layers(), rows, [Slices(group, pieces), Slices(group, pieces)])
            for pieces, rows in EXCHANGES
        },
        **{f"{kind} in {pieces}": of_kind(kind, [Slices(group, pieces)]) for kind in TOLERANCE for pieces in PIECES},
        **{f"vocabulary {chunk}": of_vocabulary(chunk, group) for chunk in (1, TARGETS)},
        "no target": of_nothing(group),
        "bfloat16": of_half_precision(group),
    }
    torch.save(answer, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", ROWS)
def test_shares_of_one_piece_are_consecutive_rows_filled_up_with_zeros(run: Run, rows: int) -> None:
    shares = torch.cat([answer[f"rows {rows} in 1"]["split"] for answer in run])
    assert len(shares) == -(-rows // SLICES) * SLICES
    assert torch.equal(shares[:rows], numbered(rows))
    assert not shares[rows:].any()


def test_each_piece_is_dealt_in_blocks_so_that_its_rows_are_consecutive(run: Run) -> None:
    first, second, third = (answer["rows 12 in 2"]["split"] for answer in run)
    dealt = torch.cat([first[:2], second[:2], third[:2], first[2:], second[2:], third[2:]])
    assert torch.equal(dealt, numbered(12))
    assert len(run[0]["rows 10 in 3"]["split"]) == 6, "blocks of two rows: the second piece has padding, the third nothing else"


@pytest.mark.parametrize(("pieces", "rows"), EXCHANGES)
def test_gathered_and_joined_rows_are_the_whole_again(run: Run, pieces: int, rows: int) -> None:
    for answer in run:
        found = answer[f"rows {rows} in {pieces}"]
        assert torch.equal(found["gathered"], numbered(rows))
        assert torch.equal(found["joined"], numbered(rows))


@pytest.mark.parametrize(("pieces", "rows"), EXCHANGES)
def test_a_gradient_of_gathered_rows_is_summed_over_the_slices_and_one_of_joined_rows_is_not(
    run: Run, pieces: int, rows: int
) -> None:
    """Slice r weighs row t with (r + 1)(t + 1) where rows are gathered, all with t + 1 where they are joined."""
    for answer in run:
        found = answer[f"rows {rows} in {pieces}"]
        weights = torch.arange(1.0, rows + 1)[:, None].expand(rows, WIDTH)
        assert torch.equal(found["of gathered"], sum(range(1, SLICES + 1)) * weights)
        assert torch.equal(found["of joined"], weights)


@pytest.mark.parametrize(("pieces", "rows"), EXCHANGES)
def test_a_sum_is_shared_and_its_gradient_gathered(run: Run, pieces: int, rows: int) -> None:
    """Slice r weighs its share with r + 1, so that the gradient of a row says who has it."""
    owners = torch.zeros(rows)
    for rank, answer in enumerate(run):
        found = answer[f"rows {rows} in {pieces}"]
        split = found["split"][:, 0]
        mine = ((split[split > 0] - 1) / WIDTH).long()
        assert torch.equal(found["summed"][split > 0], sum(range(1, SLICES + 1)) * numbered(rows)[mine])
        owners[mine] = rank + 1.0
    for answer in run:
        assert torch.equal(answer[f"rows {rows} in {pieces}"]["of summed"], owners[:, None].expand(rows, WIDTH))


@pytest.mark.parametrize(("pieces", "rows"), EXCHANGES)
@pytest.mark.parametrize("what", ["layers", "stages"])
def test_layers_in_slices_compute_the_whole(run: Run, what: str, pieces: int, rows: int) -> None:
    """In one stage, and in one stage each, which send each other a slice's share of the rows."""
    whole = of_layers(layers(), rows, [])
    del whole["sent"]
    for rank, answer in enumerate(run):
        found = answer[f"{what} {rows} in {pieces}"]
        assert found["sent"].shape == answer[f"rows {rows} in {pieces}"]["split"].shape
        for name, tensor in whole.items():
            dimension = cut_dimension(name)
            expected = tensor if dimension is None else tensor.tensor_split(SLICES, dimension)[rank]
            torch.testing.assert_close(found[name], expected, rtol=0, atol=5e-5 * max(1.0, float(tensor.abs().max())))


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_layers_of_any_kind_in_slices_compute_the_whole(run: Run, kind: str, pieces: int) -> None:
    whole = of_kind(kind, [])
    del whole["sent"]
    for rank, answer in enumerate(run):
        found = answer[f"{kind} in {pieces}"]
        for name, tensor in whole.items():
            if name not in found:
                assert rank > 0, "only the first slice adds these"
                assert name.endswith(".out.bias"), name
                continue
            dimension = cut_dimension(name)
            expected = tensor if dimension is None else tensor.tensor_split(SLICES, dimension)[rank]
            assert (found[name] - expected).norm() <= TOLERANCE[kind] * tensor.norm(), name


def test_frozen_layers_have_no_gradients_and_pass_on_those_of_their_rows(run: Run) -> None:
    for answer in run:
        assert set(answer["frozen in 1"]) == {"output", "x", "sent"}


@pytest.mark.parametrize("chunk", [1, TARGETS])
def test_a_vocabulary_that_slices_cannot_share_equally(run: Run, chunk: int) -> None:
    decoder = make_decoder()
    loss = tokens_loss(decoder, token_loss)
    loss.backward()
    assert [len(answer[f"vocabulary {chunk}"]["embed"]) for answer in run] == [4, 3, 3]
    for answer in run:
        torch.testing.assert_close(answer[f"vocabulary {chunk}"]["loss"], loss.detach())
        torch.testing.assert_close(answer[f"vocabulary {chunk}"]["norm"], decoder.norm.weight.grad)
    for name in ("embed", "head"):
        together = torch.cat([answer[f"vocabulary {chunk}"][name] for answer in run])
        torch.testing.assert_close(together, decoder.get_submodule(name).weight.grad)


def test_a_microbatch_without_targets_has_no_loss(run: Run) -> None:
    assert all(answer["no target"] == 0 for answer in run)


def test_the_gradient_of_the_head_is_summed_in_float32(run: Run) -> None:
    decoder, x, labels = make_decoder(), *many_targets()
    token_loss(x, labels, decoder.output_weight).backward()
    exact = decoder.output_weight.grad
    together = torch.cat([answer["bfloat16"] for answer in run])
    assert (together - exact).norm() < 4e-3 * exact.norm()


def numbered(rows: int) -> Tensor:
    return torch.arange(1.0, rows * WIDTH + 1).view(rows, WIDTH)


def exchanged(rank: int, rows: SliceRows) -> dict[str, Tensor]:
    """Every collective on numbered rows, and the gradient that comes of its weighted sum."""
    weights = torch.arange(1.0, rows.num_rows + 1)[:, None]
    whole = numbered(rows.num_rows).requires_grad_()
    share = split_rows(whole, rows)
    gathered = gather_rows(share, rows)
    (gathered * weights * (rank + 1)).sum().backward()
    of_gathered, whole.grad = whole.grad, None
    joined = join_rows(split_rows(whole, rows), rows)
    (joined * weights).sum().backward()
    of_joined, whole.grad = whole.grad, None
    summed = sum_to_share((rank + 1) * whole, rows)
    (summed * (rank + 1)).sum().backward()
    assert whole.grad is not None
    values = {"split": share, "gathered": gathered, "joined": joined, "summed": summed}
    of_summed = whole.grad / (rank + 1)
    gradients = {"of gathered": of_gathered, "of joined": of_joined, "of summed": of_summed}
    return {name: tensor.detach() for name, tensor in {**values, **gradients}.items() if tensor is not None}


def seed(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)


def layers() -> nn.ModuleList:
    blocks = decoder_blocks(SHAPE)
    seed(blocks)
    return blocks


def of_layers(
    blocks: nn.ModuleList, rows: int, stages: Sequence[Slices], *, puts_off: bool = False, dropout: ResidualDropout | None = None
) -> dict[str, Tensor]:
    """Output and all gradients of two layers on `rows` rows, the first layer recomputed in its backward.

    stages: the slices of each of two stages, of one stage that has both layers, or none for whole layers. puts_off: whether the
    weights of slices get their gradients behind the backward, as under `zero-bubble`. dropout: of the layers.
    """
    first, second = blocks.children()
    if len(stages) == 2:
        stages[0].shard([first], is_last=False)
        stages[1].shard([second], is_first=False)
    elif stages:
        stages[0].shard([first, second])
    weight_gradients = WeightGradients(blocks if puts_off and stages else nn.ModuleList())
    run = [stages[number].with_rows(layer, rows) if stages else layer for number, layer in ((0, first), (-1, second))]
    if dropout is not None:
        run = [dropout.with_keys(layer, torch.arange(rows) << 32) for layer in run]
    positions = torch.arange(rows)
    args = (
        rotation(positions[:, None], WIDTH // SHAPE.heads, theta=1e4),
        Segments(lengths=(rows,), longest=rows, cu_seqlens=torch.tensor([0, rows], dtype=torch.int32)),
    )
    x = (numbered(rows) / 10).sin().requires_grad_()
    hidden = checkpoint(run[0], x, *args, use_reentrant=False)
    if stages and rows > 1:  # another microbatch comes in between, as in a pipeline
        stages[0].with_rows(nn.Identity(), 1)(x)
    sent = hidden.detach().requires_grad_()
    assert not stages or len(sent) == stages[0].rows_between_stages(rows)
    output = run[1](sent, *args)
    with torch.autocast("cpu", enabled=False):  # as the executor runs it
        output.float().square().sum().backward()
        hidden.backward(sent.grad)
        if puts_off and stages:
            assert all("norm" in name for name, parameter in blocks.named_parameters() if parameter.grad is not None)
        weight_gradients.take()()
    for slices in stages:
        for parameter in slices.partial:
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            reduce(parameter.grad, slices.group)
    return {"output": output.detach(), "x": x.grad, "sent": sent.detach(), **gradients_of(blocks)}  # type: ignore[dict-item]


def of_kind(kind: str, stages: Sequence[Slices]) -> dict[str, Tensor]:
    """What `of_layers` returns of one stage, or of whole layers, of one kind."""
    if kind == "biases":
        blocks = encoder_blocks(replace(SHAPE, gated=False))
        seed(blocks)
        return of_layers(blocks, ROWS_OF_KINDS, stages)
    if kind == "bfloat16 products":
        with torch.autocast("cpu", torch.bfloat16):
            return of_layers(layers(), ROWS_OF_KINDS, stages)
    blocks = layers().requires_grad_(kind != "frozen")
    dropout = ResidualDropout(blocks, 0.3, seed=7) if kind == "dropout" else None
    return of_layers(blocks, ROWS_OF_KINDS, stages, puts_off=kind == "put off", dropout=dropout)


def make_decoder() -> Decoder:
    decoder = Decoder(SHAPE, vocab_size=VOCAB, tied=False)
    seed(decoder)
    return decoder


IDS = torch.tensor([0, 3, 4, 9, 6, 7, 3])
IDS_TARGETS = Targets.of(
    torch.tensor([3, 4, 9, LABEL_IGNORED, 7, 3, LABEL_IGNORED]), torch.tensor([0.5, 1.0, 2.0, 0.0, 0.25, 3.0, 0.0])
)


def tokens_loss(decoder: Decoder, loss: Callable[[Tensor, Targets, Tensor], Tensor]) -> Tensor:
    return loss(decoder.norm(decoder.embed(IDS)), IDS_TARGETS, decoder.output_weight)


def of_vocabulary(chunk: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Loss and gradients, with logits for that many targets at a time."""
    decoder = make_decoder()
    vocabulary = cut_vocabulary(decoder, group)
    assert vocabulary is not None
    most = chunk * len(decoder.output_weight)
    loss = tokens_loss(decoder, lambda *args: sliced_token_loss(*args, vocabulary, max_logits=most))
    loss.backward()
    gradients = {name: decoder.get_submodule(name).weight.grad for name in ("embed", "head", "norm")}
    return {"loss": loss.detach(), **gradients}  # type: ignore[dict-item]


def of_nothing(group: dist.ProcessGroup) -> float:
    decoder = make_decoder()
    vocabulary = cut_vocabulary(decoder, group)
    assert vocabulary is not None
    targets = Targets.of(torch.full((2,), LABEL_IGNORED))
    return float(sliced_token_loss(torch.ones(2, WIDTH), targets, decoder.output_weight, vocabulary))


def many_targets() -> tuple[Tensor, Targets]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(512, WIDTH, generator=generator), Targets.of(torch.randint(VOCAB, (512,), generator=generator))


def of_half_precision(group: dist.ProcessGroup) -> Tensor:
    """The head's gradient from products in bfloat16, in chunks of a few targets."""
    decoder = make_decoder()
    vocabulary = cut_vocabulary(decoder, group)
    assert vocabulary is not None
    with torch.autocast("cpu", torch.bfloat16):
        loss = sliced_token_loss(*many_targets(), decoder.output_weight, vocabulary, max_logits=16)
    loss.backward()
    assert decoder.output_weight.grad is not None
    return decoder.output_weight.grad


def test_slices_of_a_weight_are_as_equal_as_can_be() -> None:
    whole = nn.Parameter(torch.arange(20.0).view(10, 2))
    parts = [slice_of(whole, 0, index, SLICES) for index in range(SLICES)]
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole)
    assert [part.untyped_storage().nbytes() for part in parts] == [32, 24, 24]
