"""Units made of modules of Hugging Face's `transformers`, in place of the compact model's, on the same packed sequences."""

from contextlib import suppress

with suppress(ImportError):  # `transformers` does not need torchaudio, but imports it if it is installed, and it must then load
    import headrace.torchaudio_import  # noqa: F401
