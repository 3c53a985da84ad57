#!/bin/sh
# Remove from an image's environment what no process of it opens: `prune.sh reorder|preprocessor|trainer`.
set -eu
cd /opt/headrace/lib/python3*/site-packages
find . -type d -name tests -not -path './torch/*' -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.pxd' -o -name '*.pyx' \) -delete
rm -rf pip pip-*.dist-info pyarrow/include numpy/_core/include torch/test
[ ! -d torch/bin ] || find torch/bin -type f ! -name torch_shm_manager -delete
# torchaudio's native part links CUDA and is not needed; without it the package loads beside every build of torch.
rm -f torchaudio/lib/*.so
# Only a trainer compiles kernels.
[ "$1" = trainer ] || rm -rf torch/include
# The service packs its ledger's pages with Arrow, and serves no payload with it.
[ "$1" != reorder ] || rm -f pyarrow/libarrow_flight*
