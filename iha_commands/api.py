"""Give Python the commands as functions: `from iha_commands.api import convert, verify, push, pull`."""

from conversion_scripts.convert_llama_to_iha import convert
from conversion_scripts.pull_from_hub import pull
from conversion_scripts.push_to_hub import push
from conversion_scripts.verify_conversion import verify


__all__ = ["convert", "verify", "push", "pull"]
