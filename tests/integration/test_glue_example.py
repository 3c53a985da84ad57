"""The examples of docs/models.md that join modules in Python, as they stand there, with small models in the named folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli.example import example_data
from headrace.preprocessor.text import BUNDLED
from headrace.processes import torchrun_environments
from tests.unit.trainer.models.glue_world import LLM, made, transformers
from tests.wire import free_ports

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PICTURES = example_data() / "pictures-00000.tar"
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN = {"hidden_size": LLM, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def example(tmp_path: Path) -> Any:
    """(a word in it) -> the page's example, with the folders of this test."""
    tower = made(transformers.SiglipVisionModel, transformers.SiglipVisionConfig, 0, **SIGLIP, patch_size=16, image_size=224)
    llm = made(transformers.Qwen2ForCausalLM, transformers.Qwen2Config, 1, **QWEN, vocab_size=4096)
    tower.save_pretrained(tmp_path / "siglip")
    llm.save_pretrained(tmp_path / "qwen")
    (tmp_path / "qwen" / "tokenizer.json").write_bytes(BUNDLED.read_bytes())

    def read(word: str) -> str:
        [found] = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in block]
        replaced = {"/models": tmp_path, "/data/pictures.tar": PICTURES, '"out"': f'"{tmp_path / "out"}"'}
        for name, path in replaced.items():
            assert name in found or name != "/models"
            found = found.replace(name, str(path))
        return found

    return read


@pytest.mark.slow
def test_the_example_in_one_process_trains(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("trainer.local"), "docs/models.md", "exec"), {})

    losses = [float(value) for value in re.findall(r"step \d loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen").state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.mark.slow
def test_the_example_of_a_pipeline_trains_and_says_the_same_losses_in_all_processes(
    example: Any, calm: Any, spec: Any, tmp_path: Path
) -> None:
    image = {"fit": "square", "side": 224, "patch": 16, "merge": 2}
    planned = {"replicas": 1, "microbatches": 2, "stages": {"vision": 1, "llm": 2}}
    job = calm.submit(spec("glued", steps=2, global_batch=4, topology=planned, image=image, sources=[{"path": str(PICTURES)}]))
    (tmp_path / "glued.py").write_text(LOGGED + example("train_pipeline").replace("127.0.0.1:7070", calm.endpoint))
    assert job == "glued"
    running = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "glued.py")],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in torchrun_environments(3, free_ports(1)[0])
    ]
    outputs = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    losses = [re.findall(r":step .* loss=([\d.]+) ", output) for output in outputs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 2


LOGGED = """import logging, headrace.torchaudio_import
logging.basicConfig(level=logging.INFO)
"""
