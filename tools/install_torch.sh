#!/usr/bin/env bash
# install_torch.sh PYTHON VERSION: installs torch, and on a Linux machine without an NVIDIA GPU its CPU build (0.2 GB instead of several).
# The CPU build lies on PyTorch's own index, or where pip's configuration finds `torch==VERSION+cpu`; else PyPI's build must do.
set -euo pipefail
python=$1 version=$2
index=https://download.pytorch.org/whl/cpu
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

if [ "$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    pip "torch==$version"
elif "$python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    pip "torch==$version" --extra-index-url "$index" # +cpu is the higher of two equal versions
elif ! pip "torch==$version+cpu" 2>/dev/null; then
    echo "no CPU build of torch $version within reach: installing the default build, a download of several GB"
    pip "torch==$version"
fi
