"""Refuse an unsupported Transformers by name, before the package imports anything that it might lack."""

import importlib.metadata
import runpy

import pytest


@pytest.fixture
def import_with(monkeypatch):
    """Return a function that runs the module with the check again, with another version of Transformers."""
    installed = importlib.metadata.version

    def import_with(version, module="configuration_iha"):
        # The check reads the version of the installed distribution; everything else stays what it is.
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == "transformers" else installed(name)
        )
        return runpy.run_module(f"modeling_iha.{module}")

    return import_with


@pytest.mark.parametrize("module", ["configuration_iha", "configuration_interleaved"])
@pytest.mark.parametrize("version", ["5.16.4", "6.0.0"])
def test_an_unsupported_version_is_refused(version, module, import_with):
    with pytest.raises(ImportError, match=f"transformers>=5.17,<6 is required .* found transformers=={version}"):
        import_with(version, module)


def test_a_supported_version_is_taken(import_with):
    assert import_with("5.99.0")["IHAConfig"].model_type == "iha"
