class ExportTesterMixin:
    """Stand in for a mixin that Transformers' source distribution leaves out; torch.export is tested here."""
