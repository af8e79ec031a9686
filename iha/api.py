"""Give Python the commands as functions: `from iha.api import convert, verify, push, pull`."""

from iha.conversion.convert_llama_to_iha import convert
from iha.conversion.verify_conversion import verify
from iha.hub.pull_from_hub import pull
from iha.hub.push_to_hub import push


__all__ = ["convert", "verify", "push", "pull"]
