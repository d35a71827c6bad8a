"""Tensors that say they are on a GPU and are not: what is done there is compared with what is done on a CPU."""

import torch


class _Pretended(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if getattr(function, "__self__", None) is torch.Tensor.device:
            return torch.device("cuda")
        return super().__torch_function__(function, types, arguments, options or {})


def pretend(tensor):
    """The same numbers, whose `device` is a GPU."""
    return tensor.as_subclass(_Pretended)
