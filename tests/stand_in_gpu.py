"""Stand in for GPUs: CPU tensors that report a CUDA device, reject tensors of another device and count waits.

`with gpus() as waits:` makes every tensor whose device is "cuda:k" a [`GpuTensor`]. It lists in `waits` each operation
for which the CPU would wait for a GPU. The values are those that a CPU computes. In C++ the tensors are on the CPU, so
autocast for CUDA and CUDA's own kernels do not run.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


aten = torch.ops.aten
CPU = torch.device("cpu")
# Their results, or the shapes of their results, depend on values.
WAITING = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
HOPPER = SimpleNamespace(major=9, total_memory=2**40)
_waits: list[str] = []


class GpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
        )
        tensor.values, tensor.place = values, device
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.place)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _compute(operator, args, kwargs or {})

    def to(self, *args, **kwargs):
        return _to(self, *args, **kwargs)

    def cpu(self):
        return _to(self, CPU)

    def tolist(self):
        _waits.append("tolist")
        return self.values.tolist()


class _Copy(torch.autograd.Function):
    """Copy a tensor to a device and a dtype, and its gradient back."""

    @staticmethod
    def forward(ctx, tensor, device, dtype):
        ctx.source = tensor.device, tensor.dtype
        if device == CPU:
            _waits.append("copy to the CPU")
        values = _values(tensor).detach().to(dtype, copy=True)
        return values if device == CPU else GpuTensor(values, device)

    @staticmethod
    def backward(ctx, gradient):
        return _Copy.apply(gradient, *ctx.source), None, None


def _to(tensor, *args, copy=False, **kwargs):
    with torch._C.DisableTorchFunction():
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or tensor.device, dtype or tensor.dtype
        if device != tensor.device:
            return _Copy.apply(tensor, device, dtype)
        return tensor if dtype == tensor.dtype and not copy else aten._to_copy(tensor, dtype=dtype)


def _values(leaf):
    return leaf.values if isinstance(leaf, GpuTensor) else leaf


def _on(device, tree):
    return tree_map(lambda leaf: GpuTensor(leaf, device) if type(leaf) is torch.Tensor else leaf, tree)


def _compute(operator, args, kwargs):
    """Compute an operator on the values, for tensors that are all on one device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    if on_gpu:
        # A number goes anywhere, an index on the CPU too.
        free = (lambda tensor: not tensor.is_cuda) if operator in INDEXING else lambda tensor: tensor.dim() == 0
        places = {tensor.device for tensor in tensors if not free(tensor)} or {on_gpu[0].device}
        if len(places) > 1 and operator is not aten.copy_.default:
            raise RuntimeError(f"Expected all tensors to be on the same device: {operator} of tensors on {places}.")
        by_mask = operator in INDEXING and any(
            index.dtype == torch.bool for index in tree_leaves(args[1]) if index is not None
        )
        if operator in WAITING or by_mask:
            _waits.append(str(operator))
        # In C++ the tensors are on the CPU, so this is how operators ask for the device of their inputs.
        device = on_gpu[0].device if kwargs.get("device") in (None, CPU) else kwargs["device"]
    else:
        device = kwargs.get("device") or CPU
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    result = operator(*tree_map(_values, args), **tree_map(_values, kwargs))
    if operator._schema.name.endswith("_") and not operator._schema.name.endswith("__"):
        return args[0]
    return result if device == CPU else _on(device, result)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return _compute(operator, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.to:
            return _to(*args, **kwargs)
        device = torch.device(kwargs.get("device") or CPU)
        if device == CPU or function is aten._to_copy:
            return function(*args, **kwargs)
        return _on(device, function(*args, **{**kwargs, "device": CPU}))  # a factory such as `torch.arange`


@contextmanager
def gpus():
    """Stand in for GPUs, and yield the list of the operations that wait for one."""
    _waits.clear()
    # The backward pass calls factories such as `torch.arange` outside the modes.
    no_driver = patch.multiple(torch.cuda, get_device_properties=lambda _: HOPPER, _lazy_init=lambda: None)
    with no_driver, _Functions(), _Operators():
        yield _waits


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a module to a device."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter.data, GpuTensor):
                moved = GpuTensor(parameter.detach(), device)
                owner._parameters[name] = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and not isinstance(buffer, GpuTensor):
                owner._buffers[name] = GpuTensor(buffer, device)
