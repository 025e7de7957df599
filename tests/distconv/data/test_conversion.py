"""A value that a dtype cannot hold raises; all others come through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distconv.data.conversion import convert_values, default_dtype
from distconv.errors import DataError

KEPT: list[tuple[Any, str, torch.dtype]] = [
    ([0, 1, 255], "u1", torch.int64),
    ([-1, 2**31 - 1], "i4", torch.int64),
    ([0, 65535], "u2", torch.uint16),
    ([2**24, -(2**24)], "i8", torch.float32),
    ([2**53], "i8", torch.float64),
    ([2048], "i8", torch.float16),
    ([256], "i4", torch.bfloat16),
    ([2**63 - 1], "u8", torch.int64),
    ([2.0, -3.0], "f4", torch.int64),
    ([1.5, np.inf, np.nan], "f8", torch.float32),
    ([1.5, np.inf, np.nan], "f4", torch.float16),
    ([1.5, -np.inf], "f4", torch.bfloat16),
    ([True, False], "?", torch.float32),
    ([0, 1], "u1", torch.bool),
    ([1 + 2j], "c16", torch.complex128),
    ([1.5], "f8", torch.complex64),
    ([1.5], "g", torch.float64),
]
LOST: list[tuple[Any, str, torch.dtype, str]] = [
    ([5, -1], "i4", torch.uint8, "-1 of int32"),
    ([0, np.nan], "f4", torch.int64, "nan of float32"),
    ([1.5], "f4", torch.int64, "1.5"),
    ([2.0**63], "f8", torch.int64, "9.22"),
    ([-(2.0**64)], "f8", torch.int64, "-1.84"),
    ([2**24 + 1], "i8", torch.float32, "16777217"),
    ([-(2**24) - 1], "i4", torch.float32, "-16777217"),
    ([2**63 - 1], "i8", torch.float32, "9223372036854775807"),
    ([2**53 + 1], "i8", torch.float64, "9007199254740993"),
    ([2049], "i8", torch.float16, "2049"),
    ([257], "u2", torch.bfloat16, "257"),
    ([2**63], "u8", torch.int64, "9223372036854775808"),
    ([-1], "i1", torch.uint64, "-1"),
    ([1e39], "f8", torch.float32, r"1e\+39"),
    ([70000.0], "f4", torch.float16, "70000"),
    ([3.4e38], "f4", torch.bfloat16, "3.4e"),
    ([2], "u1", torch.bool, "2"),
    ([0.5], "f4", torch.bool, "0.5"),
    ([np.nan], "f4", torch.bool, "nan"),
    ([2**24 + 1], "i4", torch.complex64, "16777217"),
]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("values", "stored", "dtype"), KEPT)
def test_values_that_fit_come_through(values: Any, stored: str, dtype: torch.dtype, order: str) -> None:
    array = np.array(values, np.dtype(stored).newbyteorder(order))  # type: ignore[call-overload]  # a str in the stubs
    array.flags.writeable = False
    found = convert_values(array[::-1], dtype, "here")
    native = array[::-1].astype(array.dtype.newbyteorder("=") if stored != "g" else "f8")
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.from_numpy(native).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("values", "stored", "dtype", "shown"), LOST)
def test_a_value_that_does_not_fit_is_named(values: Any, stored: str, dtype: torch.dtype, shown: str) -> None:
    with pytest.raises(DataError, match=f"^sample 3 has the value {shown}.* {dtype} cannot hold. Give its Field"):
        convert_values(np.array(values, stored), dtype, "sample 3")


@pytest.mark.parametrize("values", [[1 + 2j], ["a"], [b"a"], np.zeros(2, [("a", "f4")]), [np.datetime64("2000")]])
def test_what_is_no_real_number_is_refused(values: Any) -> None:
    with pytest.raises(DataError, match=r"here has values of .* Store real numbers"):
        convert_values(np.array(values), torch.float32, "here")


def test_a_single_value_has_no_dimension() -> None:
    assert torch.equal(convert_values(np.float32(2), torch.float32, "here"), torch.tensor(2.0))  # type: ignore[arg-type]


def test_integers_stay_integers_by_default() -> None:
    kinds = {"?": torch.bool, "u1": torch.int64, "i4": torch.int64, ">u2": torch.int64, "f2": torch.float32}
    assert {kind: default_dtype(np.dtype(kind)) for kind in kinds} == kinds
    assert default_dtype(np.dtype("f8")) == torch.float32


def test_flipped_values_of_extent_one_are_converted():
    values = np.arange(3.0).reshape(3, 1)[:, ::-1]
    assert values.strides[1] < 0 and values.flags.c_contiguous
    assert torch.equal(convert_values(values, torch.float32, "x"), torch.tensor([[0.0], [1.0], [2.0]]))
