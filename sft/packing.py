"""Which recipes may pack several documents into one sequence: only what keeps the documents apart.

TRL packs `bfd` (best fit decreasing) and `bfd_split` without padding: `position_ids` restart at every document, which
the masks of eager, SDPA and FlexAttention and the lengths of FlashAttention are made from. `wrapped` packing has
nothing that tells documents apart.
"""

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested
from trl import SFTConfig

from common.command_io import UserError


STRATEGIES = ("bfd", "bfd_split", "wrapped")
# Besides the flash cores.
ISOLATING_CORES = ("eager", "sdpa", "flex_attention")


def check_packing_keys(args: SFTConfig) -> None:
    """Raises `UserError` for keys of packing that TRL refuses with a traceback after it has tokenized all rows."""
    if args.packing_strategy not in STRATEGIES:
        raise UserError(f"packing_strategy {args.packing_strategy!r}: expected one of {', '.join(STRATEGIES)}.")
    if args.eval_packing and not args.packing:
        raise UserError(
            "eval_packing without packing: TRL would join the held-out rows and not tell them apart; set both or neither."
        )
    if args.packing and args.max_length is None:
        raise UserError("packing needs max_length, the length of a packed sequence.")
    if args.padding_free and not args.packing and args.max_length is not None:
        raise UserError("padding_free without packing leaves rows uncut: set packing to true, or max_length to null.")


def check_strategy(args: SFTConfig, kind: str, say: Callable[[str], None]) -> None:
    """Raises `UserError` where conversations would attend to one another; says so where plain text does.

    Args:
        kind: of the rows, "messages" or "text".
        say: prints a line.
    """
    if not args.packing or args.packing_strategy != "wrapped":
        return
    if kind == "messages":
        raise UserError(
            "packing_strategy 'wrapped' cuts conversations anywhere and lets them attend to one another: use 'bfd'."
        )
    say("packing_strategy is 'wrapped': documents in one sequence attend to one another.")


def check_packing(model: PreTrainedModel, args: SFTConfig) -> None:
    """Raises `UserError` for an attention core that is not known to keep packed documents apart."""
    core = model.config._attn_implementation
    if not (args.packing or args.padding_free):
        return
    if core not in ISOLATING_CORES and not is_flash_attention_requested(model.config):
        raise UserError(
            f"packing with attn_implementation={core!r} is not known to keep documents apart: use one of "
            f"{', '.join(ISOLATING_CORES)} or a flash core, or set packing to false."
        )
