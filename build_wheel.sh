#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ./build_wheel.sh --target cpu|cu130|cu124 [--tag X.Y.Z]  ->  dist/vllm-X.Y.Z+tqN.TARGET-....whl
set -eu
cd "$(dirname "$0")"
make --silent setup
exec .venv/bin/python -m tools.wheel build "$@"
