class GenerationTesterMixin:
    """Stands in for a mixin of Transformers' tests that its source distribution leaves out; `generate` is tested here
    instead."""
