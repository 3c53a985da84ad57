"""A machine needs only the extras of what it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OF_PREPROCESSOR = ("PIL", "simplejpeg", "torchaudio", "tokenizers", "soundfile", "miniaudio", "tiktoken")
OF_TRAINER = ("torch", "fsspec")
WITHOUT = """
import sys
lacking = sys.argv.pop(1).split(",")

class Lacking:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
"""
COMMAND = "from headrace.cli.main import main; sys.exit(main())"


def run(lacking: tuple[str, ...], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program, ",".join(lacking), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_job_is_submitted_where_nothing_can_be_decoded(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("{name: j, sources: [{path: /data}], steps: 1, global_batch: 1}")
    done = run((*OF_PREPROCESSOR, *OF_TRAINER), COMMAND, "job", "submit", str(spec), "--endpoint", "127.0.0.1:1")
    assert "no reorder service answers at 127.0.0.1:1" in done.stderr, "it has come as far as that"


def test_a_trainer_decodes_nothing() -> None:
    done = run(
        OF_PREPROCESSOR,
        "import headrace.cli.watch.submission, headrace.trainer.train\n"
        "import headrace.trainer.pipeline.pipeline_training, headrace.trainer.recovery.node",
    )
    assert done.returncode == 0, done.stderr


def test_what_is_lacking_is_named_with_its_remedy(tmp_path: Path) -> None:
    done = run(("PIL",), COMMAND, "inspect", str(tmp_path))
    assert done.returncode == 2
    assert "this installation lacks PIL; install it with `pip install 'headrace[preprocessor]'`" in done.stderr
