#!/usr/bin/env bash
# install_torch.sh PYTHON VERSION: installs torch; on Linux without an NVIDIA GPU the CPU build (0.2 GB instead of several).
# The CPU build comes from PyTorch's own index, or from pip's configured index as `torch==VERSION+cpu`; otherwise PyPI's build is used.
set -euo pipefail
python=$1 version=$2
index=https://download.pytorch.org/whl/cpu
pip() { "$python" -m pip install --no-input --disable-pip-version-check "$@"; }

if [ "$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    pip "torch==$version"
elif "$python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    pip "torch==$version" --extra-index-url "$index" # +cpu is the higher of two equal versions
elif ! pip "torch==$version+cpu" 2>/dev/null; then
    echo "no CPU build of torch $version was found: installing the default build, a download of several GB"
    pip "torch==$version"
fi
