# SPDX-License-Identifier: Apache-2.0
"""TurboQuant KV cache with token-wise dynamic scaling factors (TDSF).

Kept light: upstream's configuration modules import it.
"""

from vllm.turboquant.formats import FORMATS, is_tdsf

__all__ = ["FORMATS", "is_tdsf"]
