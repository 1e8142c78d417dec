#!/usr/bin/env bash
# Checks the eager step on one CUDA device: ids equal the CPU's. Needs a Python with a CUDA build of torch, numpy,
# safetensors, tokenizers and pytest; PYTHON names it. Takes about a minute; skips nothing silently.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD"
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
"$PYTHON" -m pytest -q -m gpu tests/gpu -s
