"""The loss of a linear head, whose logits exist for a few targets at a time: loss and gradients of the plain one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace.sample import LABEL_IGNORED
from headrace.trainer.models import loss as loss_module
from headrace.trainer.models.loss import Targets, token_loss
from headrace.trainer.pipeline.live_bytes import LiveBytes

VOCAB, WIDTH, LENGTH = 64, 8, 10


@pytest.fixture
def head() -> tuple[Tensor, Tensor]:
    """Hidden states (LENGTH, WIDTH), and the weight of the head."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator, requires_grad=True) for n in (LENGTH, VOCAB))
    return hidden, weight


@pytest.fixture
def labels() -> Tensor:
    """(LENGTH,) of which two carry no loss."""
    labels = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))
    labels[[0, 4]] = LABEL_IGNORED
    return labels


@pytest.fixture(params=["at once", "in the backward", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """How the gradients are computed, as arguments of `token_loss`. Compiled code is traced, and run by torch's own kernels."""
    monkeypatch.setattr(loss_module.torch, "compile", partial(torch.compile, backend="aot_eager"))
    return {"at_once": request.param != "in the backward", "compiled": request.param == "compiled"}


@pytest.mark.parametrize("most_targets", [1, 3, 100])
@pytest.mark.parametrize("has_weights", [False, True])
def test_loss_and_gradients_are_the_plain_ones(
    head: tuple[Tensor, Tensor], labels: Tensor, way: dict[str, bool], most_targets: int, has_weights: bool
) -> None:
    hidden, weight = head
    weights = torch.where(labels == LABEL_IGNORED, 0.0, torch.rand(LENGTH, generator=torch.Generator().manual_seed(2)))
    weights = weights if has_weights else (labels != LABEL_IGNORED).float()
    expected = (functional.cross_entropy(hidden @ weight.T, labels, reduction="none") * weights).sum()
    loss = token_loss(
        hidden, Targets.of(labels, weights if has_weights else None), weight, max_logits=VOCAB * most_targets, **way
    )
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(3 * expected, head)
    for gradient, want in zip(torch.autograd.grad(3 * loss, head), wanted, strict=True):
        torch.testing.assert_close(gradient, want)


def test_what_is_frozen_or_not_asked_for_costs_no_gradient(
    head: tuple[Tensor, Tensor], labels: Tensor, way: dict[str, bool]
) -> None:
    hidden, weight = head
    targets = Targets.of(labels)
    loss = token_loss(hidden, targets, weight.detach(), **way)
    (of_hidden,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(of_hidden, torch.autograd.grad(token_loss(hidden, targets, weight, **way), hidden)[0])
    with torch.no_grad():
        assert not token_loss(hidden, targets, weight, **way).requires_grad


def test_no_target_is_a_loss_of_zero(head: tuple[Tensor, Tensor], way: dict[str, bool]) -> None:
    loss = token_loss(head[0], Targets.of(torch.full((LENGTH,), LABEL_IGNORED)), head[1], **way)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, head))
    assert loss == 0


def test_a_model_that_is_nearly_sure_learns_what_is_left_to_learn_in_half_precision() -> None:
    """A probability of 0.9995 is 1 in bfloat16; the gradient of its logit is not 0."""
    hidden, weight = torch.ones(1, 1), torch.zeros(VOCAB, 1)
    weight[5] = 11.75
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        token_loss(hidden, Targets.of(torch.tensor([5])), weight).backward()
    assert weight.grad is not None
    probability = weight.detach().softmax(0)[5, 0]
    assert weight.grad[5, 0] == pytest.approx(float(probability) - 1, rel=0.01)
    assert weight.grad.sum() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("pieces", [1, 16, 128])
@pytest.mark.parametrize("at_once", [True, False])
def test_in_half_precision_the_gradient_of_the_head_does_not_depend_on_the_number_of_pieces(pieces: int, at_once: bool) -> None:
    """Its rounding is that of one product; summed up in bfloat16 over 128 pieces it would be several times as large."""
    generator, num_targets, vocab = torch.Generator().manual_seed(0), 16_384, 1024
    hidden, table = torch.randn(num_targets, 64, generator=generator), 0.05 * torch.randn(vocab, 64, generator=generator)
    targets = Targets.of(torch.randint(0, vocab, (num_targets,), generator=generator))

    def gradients(max_logits: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weight = hidden.clone().requires_grad_(), table.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = token_loss(x, targets, weight, max_logits=max_logits, at_once=at_once)
        return torch.autograd.grad(loss, (x, weight))

    rounded = gradients(vocab * num_targets // pieces, torch.bfloat16)
    for gradient, exact in zip(rounded, gradients(vocab * num_targets, torch.float32), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() / exact.norm() < 2.6e-3


def test_a_loss_does_not_take_the_weight_from_a_later_one() -> None:
    """Autocast keeps casts for all that is in it; one that was made without a graph would have no gradient to give."""
    hidden, weight = torch.randn(8, 4), torch.randn(16, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        token_loss(hidden, Targets.of(torch.zeros(8, dtype=torch.int64)), weight)
        later = functional.linear(hidden, weight).sum()
    assert torch.autograd.grad(later, weight)[0].norm() > 0


@pytest.mark.parametrize("at_once", [True, False])
def test_few_logits_are_there_at_a_time_and_none_wait_for_the_backward(at_once: bool) -> None:
    num_targets, vocab, few = 64, 512, 4
    hidden, weight = torch.randn(num_targets, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    with LiveBytes() as meter:
        loss = token_loss(hidden, Targets.of(torch.arange(num_targets)), weight, max_logits=few * vocab, at_once=at_once)
        held = meter.now
        loss.backward()
    states, of_logits, of_weight = hidden.nbytes, 4 * few * vocab, weight.nbytes
    assert held <= 8 * states + at_once * of_weight
    assert meter.most <= 8 * states + 2 * of_weight + 4 * of_logits < 4 * num_targets * vocab


def test_gradients_that_were_computed_at_once_are_used_once(head: tuple[Tensor, Tensor], labels: Tensor) -> None:
    loss = token_loss(head[0], Targets.of(labels), head[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients of this loss are used up: call backward once"):
        loss.backward()
