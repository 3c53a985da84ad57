"""A small model of one's own, trained in plain PyTorch on the batches of `headrace.trainer.connect`.

python examples/plain_loop.py --endpoint 127.0.0.1:7070 --job demo
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace import trainer


class SmallModel(nn.Module):
    """One decoder block over text and image patches; a recording is no more than its placeholders."""

    def __init__(self, loader: trainer.StepLoader, width: int = 128) -> None:
        super().__init__()
        image = loader.spec.image
        self.image_token = loader.vocabulary.image_token
        self.embedding = nn.Embedding(loader.vocabulary.size, width)
        self.projector = nn.Linear(image.merge**2 * 3 * image.patch**2, width)
        self.block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, norm_first=True)
        self.head = nn.Linear(width, loader.vocabulary.size)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, patches: Tensor) -> Tensor:
        """The summed loss of the targets: `labels` are shifted already, -100 is none. There may be no token, and no patch."""
        images = self.projector(patches.view(-1, self.projector.in_features) / 255)
        x = self.embedding(input_ids).index_copy(0, (input_ids == self.image_token).nonzero().squeeze(1), images)
        sample = (position_ids == 0).cumsum(0)
        visible = (sample[:, None] == sample).tril()  # of its own sample, what came before
        x = self.block(x, src_mask=~visible)
        return functional.cross_entropy(self.head(x), labels, reduction="sum")


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the reorder service")
    parser.add_argument("--job", required=True, help="name of a job that was submitted")
    return parser.parse_args()


def main() -> None:
    """Train until the job's last step is committed."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with trainer.connect(args.endpoint, job=args.job) as loader:
        torch.manual_seed(loader.spec.seed)
        model = SmallModel(loader).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in loader:
            loss_sum, num_targets = 0.0, 0
            for microbatch in step:
                data = microbatch.data.to(device)
                loss = model(data.input_ids, data.position_ids, data.labels, data.patches)
                loss.backward()
                loss_sum += loss.item()
                num_targets += data.num_targets
            for parameter in model.parameters():
                parameter.grad /= max(1, num_targets)  # known now: of the global batch
            optimizer.step()
            optimizer.zero_grad()
            loss_mean = loss_sum / max(1, num_targets)
            loader.commit(step, loss=loss_mean)
            print(f"step {step.index} loss {loss_mean:.6f}", flush=True)


if __name__ == "__main__":
    main()
