"""Any causal language model of `transformers` on packed samples: each sample is a row, padded to the longest one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.trainer.loading.collate import PackedMicrobatch, places
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.decoder import Decoder


class PaddedTrunk(nn.Module):
    """All layers of a language model as one: (T, width) -> (T, width)."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self._takes_positions = "position_ids" in inspect.signature(trunk.forward).parameters

    def forward(self, x: Tensor, where: Tensor, segments: Segments) -> Tensor:
        """Spread the tokens over rows, and collect what becomes of them. where: (2, T), see `PaddedDecoder.positions`."""
        place, row = where
        shape = len(segments.lengths), segments.longest
        cells = row * segments.longest + place
        padded = x.new_zeros(shape[0] * shape[1], x.shape[1]).index_copy(0, cells, x)
        mask = torch.zeros(shape[0] * shape[1], dtype=torch.int64, device=x.device).index_fill(0, cells, 1)
        positions = {"position_ids": torch.arange(shape[1], device=x.device).expand(shape)} if self._takes_positions else {}
        output = self.trunk(inputs_embeds=padded.view(*shape, -1), attention_mask=mask.view(shape), use_cache=False, **positions)
        hidden: Tensor = output[0].flatten(0, 1)[cells]
        return hidden


class PaddedDecoder(Decoder):
    """A language model with the modules of `Decoder`. Its layers are one, which a pipeline cannot cut."""

    def __init__(self, model: Any) -> None:
        """Raises UserError where the model's head is not one matrix, or is not to be found."""
        nn.Module.__init__(self)
        name = type(model).__name__
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None or not hasattr(model, "get_decoder"):
            raise UserError(f"the language model, a {name}, is neither a causal one of transformers nor a Decoder of headrace")
        self.embed = model.get_input_embeddings()
        self.layers = nn.ModuleList([PaddedTrunk(model.get_decoder())])
        self.norm: Any = nn.Identity()
        self.head = None if head.weight is self.embed.weight else head
        self.width = int(self.embed.embedding_dim)
        self._check_head(model, name)

    def positions(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the place of each token in its row, and the row: (2, T) int64, on the host."""
        lengths = microbatch.cu_seqlens.diff()
        return torch.stack((places(lengths), torch.repeat_interleave(torch.arange(len(lengths)), lengths)))

    def layer_args(self, position_ids: Tensor, segments: Segments) -> tuple[Any, ...]:
        """Return what the only layer takes besides its hidden states."""
        return position_ids, segments

    def drop_second_embedding(self) -> None:
        """Take the embedding out of the trunk, which has it too: a pipeline would hold it twice."""
        trunk: Any = self.layers[0].trunk
        trunk.set_input_embeddings(nn.Identity())

    @torch.no_grad()
    def _check_head(self, model: Any, name: str) -> None:
        """Compare the logits of two tokens with those of the model: a head may have a bias, a scale or a cap.

        A bias may still be 0, and a cap not reached by weights that are fresh, so that these are looked for by name.
        """
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            self._refuse(name, "its head has a bias")
        if getattr(model.config, "final_logit_softcapping", None):
            self._refuse(name, "they are capped (final_logit_softcapping)")
        was_training = model.training
        model.eval()
        ids = torch.arange(2, device=self.embed.weight.device)
        segments = Segments.of(torch.tensor([0, 2], dtype=torch.int32))
        where = torch.stack((ids, torch.zeros_like(ids)))
        ours = self(self.embed(ids), where, segments) @ self.output_weight.T
        theirs = model(input_ids=ids[None]).logits[0]
        model.train(was_training)
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
            self._refuse(name, "they are scaled, or its hidden states change behind the decoder")

    @staticmethod
    def _refuse(name: str, why: str) -> None:
        raise UserError(f"the logits of {name} are not its last hidden states times one matrix, as the packed loss has it: {why}")
