# SPDX-License-Identifier: Apache-2.0
"""Names that a module uses and nothing defines.

An edit that lands in the right place can still be broken by a renamed parameter; this
tells before anything runs.
"""

import builtins
import functools
import symtable

_GIVEN = set(dir(builtins)) | {"__file__", "__name__", "__path__", "__spec__", "__doc__"}


@functools.lru_cache(maxsize=256)
def undefined(text: str) -> set[str]:
    """Names read somewhere in the module that no scope around the reader binds."""
    top = symtable.symtable(text, "module", "exec")
    tables = list(_walk(top))
    known = _GIVEN | {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if _binds(symbol) and (table is top or symbol.is_declared_global())
    }
    return {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced()
        and (symbol.is_global() or (table is top and not _binds(symbol)))
        and symbol.get_name() not in known
    }


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _walk(table: symtable.SymbolTable):
    yield table
    for child in table.get_children():
        yield from _walk(child)
