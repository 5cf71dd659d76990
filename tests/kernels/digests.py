# SPDX-License-Identifier: Apache-2.0
"""Prints the variant in use, then for each scene digests of its cache and of its attention.

VLLM_TQ_ISA is read once per process, so test_variants.py runs this in one process per variant.
"""

import hashlib

import torch

from tests.kernels.scene import drawn_scene, make_scene
from vllm.turboquant import kernels
from vllm.turboquant.formats import FORMATS, HEAD_DIMS


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def scenes():
    for name in FORMATS:
        for dim in HEAD_DIMS:
            yield make_scene(name, heads=1, group=dim % 7 + 1, dim=dim, lengths=(33, 560), seed=dim)
    for seed in range(12):
        yield drawn_scene(seed)


if __name__ == "__main__":
    print(kernels.isa())
    for scene in scenes():
        chunks = [(r, max(0, n - 50), n) for r, n in enumerate(scene.lengths)]
        print(digest(scene.cache), digest(scene.attend(chunks)))
