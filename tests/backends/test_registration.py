# SPDX-License-Identifier: Apache-2.0
"""Our side of the cache-dtype registry that upstream has from 0.33 on."""

import torch

from vllm.turboquant.formats import FORMATS
from vllm.turboquant.registration import register_formats
from vllm.v1.kv_cache_interface import KVQuantMode


def test_every_format_is_registered_with_its_answers():
    handlers = {}

    def register(name):
        return lambda handler: handlers.setdefault(name, handler())

    register_formats(register)
    assert list(handlers) == list(FORMATS)
    for name, handler in handlers.items():
        assert handler.name == name
        assert handler.torch_dtype() is torch.uint8
        assert handler.quant_mode() is KVQuantMode.NONE
