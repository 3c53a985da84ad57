"""Libraries are loaded elsewhere: one that ends its process is named, and the others are loaded all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.cli.doctor import native_libraries
from headrace.cli.doctor.diagnosis import State
from headrace.cli.doctor.native_libraries import libraries, loaded, redis_server

CRASHES = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
LACKS = "raise OSError('libsndfile.so.1: cannot open shared object file')\n"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simplejpeg that crashes, and a soundfile without its library."""
    for name, text in {"simplejpeg": CRASHES, "soundfile": LACKS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_a_library_that_does_not_load_is_a_fault(broken: None) -> None:
    names = ("simplejpeg", "soundfile")
    crashed, failed = libraries(names, loaded(names))
    assert (crashed.state, failed.state) == (State.FAULT, State.FAULT)
    assert crashed.found == "does not load: it ends the process that loads it with SIGSEGV"
    assert crashed.remedy.startswith("`pip install --force-reinstall simplejpeg`")
    assert failed.found == "does not load: libsndfile.so.1: cannot open shared object file"


def test_a_library_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simplejpeg.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(native_libraries, "LOAD_TIMEOUT_S", 0.1)
    assert loaded(["simplejpeg"]) == {"simplejpeg": {"error": "it was not loaded after 0 s"}}


def test_torchaudio_is_well_without_its_extension() -> None:
    facts = {"torchaudio": {"version": "2.11.0", "native": False}, "torch": {"version": "2.11.0"}}
    assert [(one.check, one.state) for one in libraries(native_libraries.TORCH, facts)] == [
        ("torch", State.OK),
        ("torchaudio", State.OK),
    ]
    assert list(libraries(native_libraries.TORCH, {})) == [], "what is not installed is told of as an extra"


def test_the_embedded_store_has_a_server() -> None:
    (one,) = redis_server()
    assert one.state is State.OK
    assert one.found.endswith("for the embedded store")
