"""Makes Triton's interpreter twice as quick: what it builds anew in every operation of every program is built once.

For conftest.py to install. Every result and every check stays what it is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# what is replaced: (where, name, the interpreter's own)
REPLACED = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        (interpreter, "_patch_lang"),
        (interpreter, "_get_np_dtype"),
        (TritonSemantic, "binary_op_sanitize_overflow_impl"),
        (core.tensor, "__init__"),
        (core.block_type, "__init__"),
    )
]
_patch_language, _numpy_dtype, _, _, _init_block_type = (original for *_, original in REPLACED)
_numpy_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple, dict] = {}


def install() -> None:
    new = patch_language_once, numpy_dtype, check_overflow, init_tensor, init_block_type
    for (owner, name, _), replacement in zip(REPLACED, new, strict=True):
        setattr(owner, name, replacement)


@functools.cache
def patch_language_once(function):
    """The interpreter does so in every call of a device function."""
    _patch_language(function)
    return interpreter._LangPatchScope()  # with nothing to restore


def numpy_dtype(dtype):
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(dtype)
    return _numpy_dtypes[name]


def check_overflow(self, lhs, rhs, binary_op):
    """Triton's own check of an addition or the like is a dozen operations of its language."""
    dtype, name = lhs.type.scalar, binary_op.__name__
    if dtype.int_bitwidth >= 64:
        return
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    exact = operation(lhs.handle.data, rhs.handle.data, dtype=np.int64)
    if exact.min() < dtype.get_int_min_value() or exact.max() > dtype.get_int_max_value():
        raise OverflowError(f"int{dtype.int_bitwidth} overflow detected for operation {name}")


@functools.cache
def _constant_shape(shape):
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constant_shape(tuple(type.shape) if type.is_block() else ())


def init_block_type(self, element_ty, shape):
    key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
    if key not in _block_types:
        _init_block_type(self, element_ty, shape)
        _block_types[key] = self.__dict__.copy()
    self.__dict__.update(_block_types[key])
