# SPDX-License-Identifier: Apache-2.0
"""Which batches upstream's TurboQuant may attend without reading its cache."""


def nothing_cached(metadata) -> bool:
    """Whether every sequence of a batch is as long as its query: no prefix lies in the cache.

    metadata: upstream's TurboQuantMetadata. Its copies in host memory are asked where it has them.
    """
    starts, lengths = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    if starts is None or lengths is None:
        starts, lengths = metadata.query_start_loc, metadata.seq_lens
    return bool(((starts[1:] - starts[:-1]) == lengths[: len(starts) - 1]).all())
