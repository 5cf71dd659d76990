# SPDX-License-Identifier: Apache-2.0
"""python -m tools.models make NAME: print the folder of a model, making it first if needed."""

import argparse

from tools import errors
from tools.models import catalog


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("make", help="make a model and print its folder")
    make.add_argument("name", help=", ".join(sorted(catalog.CATALOG)))
    print(catalog.make(parser.parse_args().name))


if __name__ == "__main__":
    errors.run(main)
