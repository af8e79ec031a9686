"""Declare the arguments that converters share."""

import argparse

from common.command_io import checkpoint, new_path


def converter_parser(description: str, example: str, src: str, dst: str) -> argparse.ArgumentParser:
    """Return a parser of the positional arguments SRC and DST; the description is the docstring of the command."""
    parser = argparse.ArgumentParser(description=description, epilog=f"example: %(prog)s {example}")
    parser.add_argument("src", type=checkpoint, help=src)
    parser.add_argument("dst", type=new_path, help=f"new directory for {dst}")
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option of the dtype in which the source is read."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default: the source's)",
    )
