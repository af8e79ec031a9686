class ExportTesterMixin:
    """Stands in for a mixin of Transformers' tests that its source distribution leaves out; torch.export is tested
    here instead."""
