class GenerationTesterMixin:
    """Stand in for a mixin that Transformers' source distribution leaves out; `generate` is tested here."""
