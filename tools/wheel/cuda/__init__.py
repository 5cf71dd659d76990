# SPDX-License-Identifier: Apache-2.0
"""Upstream's CUDA kernels, compiled for CUDA 12.4.

`toolkit` finds or assembles nvcc 12.4; `kernels` runs upstream's own CMake, with torch/ in
torch's place, and keeps every object between runs.
"""
