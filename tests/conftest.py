# SPDX-License-Identifier: Apache-2.0
"""The order of the suite: what is quick and basic first, whole servers last."""

from pathlib import Path

AREAS = ("series", "formats", "kernels", "triton", "wheel", "models", "backends", "serving")


def pytest_collection_modifyitems(config, items):
    """Sort by area; an area that is not listed comes last, none is left out."""
    root = Path(__file__).parent

    def place(item) -> int:
        area = item.path.relative_to(root).parts[0]
        return AREAS.index(area) if area in AREAS else len(AREAS)

    items.sort(key=place)
