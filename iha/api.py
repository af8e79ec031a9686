"""Give Python the commands as functions: `from iha.api import convert, verify, push, pull`."""

from iha.conversion_scripts.convert_llama_to_iha import convert
from iha.conversion_scripts.pull_from_hub import pull
from iha.conversion_scripts.push_to_hub import push
from iha.conversion_scripts.verify_conversion import verify


__all__ = ["convert", "verify", "push", "pull"]
