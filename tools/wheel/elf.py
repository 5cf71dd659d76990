# SPDX-License-Identifier: Apache-2.0
"""What a shared library asks of the host that loads it."""

from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

# The newest symbol versions of manylinux_2_28 (PEP 600; the policy file of auditwheel).
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def needed(library: Path) -> list[str]:
    """The libraries it names as its own needs (DT_NEEDED)."""
    with library.open("rb") as file:
        return needed_by(ELFFile(file))


def needed_by(elf: ELFFile) -> list[str]:
    """The same of an open file; an object file or a static program needs none."""
    dynamic = [section for section in elf.iter_sections() if isinstance(section, DynamicSection)]
    return [tag.needed for section in dynamic for tag in section.iter_tags("DT_NEEDED")]


def too_new(library: Path, floor: dict[str, tuple[int, ...]] = MANYLINUX_2_28) -> list[str]:
    """Symbols, as name@VERSION, that a host of this floor does not have."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        names = needed_versions(elf)
        bad = {index for index, name in names.items() if _above(name, floor)}
        versions = next((s for s in elf.iter_sections() if isinstance(s, GNUVerSymSection)), None)
        symbols = elf.get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        if versions is None:
            return []
        found = []
        for index, symbol in enumerate(symbols.iter_symbols()):
            version = versions.get_symbol(index)["ndx"]
            if version in bad:
                found.append(f"{symbol.name}@{names[version]}")
        return sorted(found)


def needed_versions(elf: ELFFile) -> dict[int, str]:
    """The symbol versions it asks of other libraries ("GLIBC_2.28"), by their index."""
    return {
        auxiliary["vna_other"]: auxiliary.name
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    }


def newest(elf: ELFFile, family: str) -> tuple[int, ...]:
    """The newest version of a family ("GLIBC") that it asks for; () when none."""
    versions = [numbers(name, family) for name in needed_versions(elf).values()]
    return max(versions, default=())


def numbers(version: str, family: str) -> tuple[int, ...]:
    """(2, 28) of "GLIBC_2.28"; () of another family, or of a name such as GLIBC_PRIVATE."""
    name, _, rest = version.partition("_")
    if name != family or not rest[:1].isdigit():
        return ()
    return tuple(int(number) for number in rest.split("."))


def _above(version: str, floor: dict[str, tuple[int, ...]]) -> bool:
    return any(numbers(version, family) > limit for family, limit in floor.items())
