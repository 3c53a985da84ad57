"""`headrace train --topology` with units of Hugging Face's transformers: in more stages and in fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cli.processes import Process, ProcessGroup
from tests.integration.test_pipeline_training import losses, wait
from tests.wire import free_ports

transformers = pytest.importorskip("transformers", reason="adapters of transformers need it: pip install 'transformers>=5'")
pytestmark = pytest.mark.integration

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def test_stages_of_transformers_modules_train_as_whole_units_do(calm, spec, tmp_path: Path) -> None:
    llm = transformers.Qwen3Config(
        **SIZES, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, vocab_size=60_000, tie_word_embeddings=True
    )
    llm.save_pretrained(tmp_path / "llm")
    transformers.SiglipVisionConfig(**SIZES, num_hidden_layers=2, patch_size=14).save_pretrained(tmp_path / "vision")
    model = {"llm": str(tmp_path / "llm"), "vision": str(tmp_path / "vision")}
    found = []
    for pp in (1, 2):
        units = {"vision": {"pp": pp}, "audio": {}, "llm": {"pp": pp}}
        planned = {"replicas": 1, "microbatches": 2, "stages": {unit: size.get("pp", 1) for unit, size in units.items()}}
        job = calm.submit(spec(f"stages-{pp}", steps=2, topology=planned))
        (tmp_path / "topology.yaml").write_text(yaml.safe_dump({"units": units, "model": model}))
        arguments = ["train", "--endpoint", calm.endpoint, "--job", job, "--threads", "1", "--topology"]
        world, (port,) = 2 * pp + 1, free_ports(1)
        ranks = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with ProcessGroup() as group:
            processes = [
                group.add(
                    Process(
                        f"trainer {rank}",
                        [*arguments, str(tmp_path / "topology.yaml")],
                        tmp_path / f"{job}-{rank}.log",
                        ranks | {"RANK": str(rank)},
                    )
                )
                for rank in range(world)
            ]
            assert wait(processes, 240.0) == [0] * world, processes[0].last_words()
        found.append(losses(processes[0].log))
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-4)
