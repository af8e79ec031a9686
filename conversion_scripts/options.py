"""Declare the arguments that converters share, and check them before the imports that take seconds."""

import argparse

from common.command_io import check_new_directory, locate_checkpoint


def converter_parser(description: str, example: str, src: str, dst: str) -> argparse.ArgumentParser:
    """Return a parser of the positional arguments SRC and DST."""
    parser = argparse.ArgumentParser(description=description, epilog=f"example: %(prog)s {example}")
    parser.add_argument("src", help=src)
    parser.add_argument("dst", help=f"new directory for {dst}")
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option of the dtype in which the source is read."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default: the source's)",
    )


def parse_paths(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, or raise `UserError` for an SRC that cannot be one and a DST that exists."""
    args = parser.parse_args()
    check_new_directory(args.dst)
    locate_checkpoint(args.src)
    return args
