"""Modules of Hugging Face's `transformers` in place of the compact model's, on the same packed sequences."""

from contextlib import suppress

with suppress(ImportError):  # `transformers` needs no torchaudio, but imports one that is installed, which must then load
    import headrace.torchaudio_import  # noqa: F401
