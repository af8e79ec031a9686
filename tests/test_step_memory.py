"""Test that the count of a step's memory leaves other threads alone."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from iha.step_memory import one_document


def test_rows_with_data_are_asked_for_documents_meanwhile():
    """Count in one thread while another attends to packed rows."""
    packed, find = torch.tensor([[0, 1, 0, 1, 2]]), masking_utils.find_packed_sequence_indices
    with one_document(), one_document():
        with ThreadPoolExecutor(1) as executor:
            found = executor.submit(lambda: masking_utils.find_packed_sequence_indices(packed)).result()
        with FakeTensorMode():
            assert masking_utils.find_packed_sequence_indices(torch.arange(5)[None]) is None
    assert found.tolist() == [[0, 0, 1, 1, 1]] and masking_utils.find_packed_sequence_indices is find
