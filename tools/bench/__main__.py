# SPDX-License-Identifier: Apache-2.0
"""python -m tools.bench VERB: the measurements that the README quotes. Each verb is a module."""

import ast
import importlib
import signal
import sys
from pathlib import Path

from tools import errors
from tools.errors import Problem


def verbs() -> dict[str, str]:
    """Every verb and the first line of its module's docstring.

    Read, not imported: a verb may need what another one's environment lacks.
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        mains = (x for x in module.body if isinstance(x, ast.FunctionDef) and x.name == "main")
        if path.stem != "__main__" and any(x.args.args for x in mains):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    known = verbs()
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        print(__doc__, *(f"  {name:10} {text}" for name, text in known.items()), sep="\n")
        return 0
    if verb not in known:
        raise Problem(
            f"no measurement is called {verb}", "tools/bench", f"one of {', '.join(known)}"
        )
    return importlib.import_module(f"tools.bench.{verb}").main(rest)


if __name__ == "__main__":
    errors.run(main)
