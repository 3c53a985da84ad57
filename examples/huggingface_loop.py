"""A Llama of Hugging Face's `transformers`, fed with packed samples. It needs `pip install 'transformers>=5'`.

python examples/huggingface_loop.py --endpoint 127.0.0.1:7070 --job demo

It is tiny and starts from random weights. With a checkpoint, `LlamaForCausalLM.from_pretrained(NAME)` takes its place, and the
job's `text.tokenizer` is that model's tokenizer.json.

transformers imports torchaudio where it finds it, and fails where that is built for another torch, such as one for CUDA beside
a CPU's. A trainer needs none: install into an environment without it.
"""

from __future__ import annotations

import torch
from plain_loop import arguments
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import trainer


class LlamaWithImages(nn.Module):
    """A Llama that sees image patches through a linear projector; a recording is no more than its placeholders."""

    def __init__(self, llama: LlamaForCausalLM, loader: trainer.StepLoader) -> None:
        super().__init__()
        image = loader.spec.image
        self.image_token = loader.vocabulary.image_token
        self.llama = llama
        self.projector = nn.Linear(image.merge**2 * 3 * image.patch**2, llama.config.hidden_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, patches: Tensor) -> Tensor:
        """The summed loss of the targets: `labels` are shifted already, -100 is none.

        With position ids, and without an attention mask or a cache, transformers takes every 0 for the start of another sample,
        and keeps attention inside of it.
        """
        images = self.projector(patches.view(-1, self.projector.in_features) / 255)
        x = self.llama.get_input_embeddings()(input_ids)
        x = x.index_copy(0, (input_ids == self.image_token).nonzero().squeeze(1), images.to(x.dtype))
        targets = (labels != -100).nonzero().squeeze(1)
        output = self.llama(inputs_embeds=x[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=targets)
        return functional.cross_entropy(output.logits[0].float(), labels[targets], reduction="sum")


def main() -> None:
    """Train until the job's last step is committed."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with trainer.connect(args.endpoint, job=args.job) as loader:
        torch.manual_seed(loader.spec.seed)
        config = LlamaConfig(
            vocab_size=loader.vocabulary.size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=loader.spec.text.max_tokens,
        )
        model = LlamaWithImages(LlamaForCausalLM(config), loader).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in loader:
            loss_sum, num_targets = 0.0, 0
            for microbatch in step:
                data = microbatch.data.to(device)
                if data.num_targets == 0:
                    continue
                loss = model(data.input_ids, data.position_ids, data.labels, data.patches)
                loss.backward()
                loss_sum += loss.item()
                num_targets += data.num_targets
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= max(1, num_targets)
            optimizer.step()
            optimizer.zero_grad()
            loss_mean = loss_sum / max(1, num_targets)
            loader.commit(step, loss=loss_mean)
            print(f"step {step.index} loss {loss_mean:.6f}", flush=True)


if __name__ == "__main__":
    main()
