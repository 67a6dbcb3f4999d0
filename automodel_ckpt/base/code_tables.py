"""Quantization by tables: the values that codes of 8 bits stand for, and how the nearest one is found.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_table(is_signed: bool) -> Tensor:
    """The 256 values of dynamic quantization between -1 (or 0) and 1, sorted, in float32.

    Source: arXiv:2110.02861, section 2.1. For each power of ten from 1e-6 to 1, the mantissas are in the middle between
    equidistant points from 0.1 to 1: 1, 2, 4, ... 64 of them if there are negative values, otherwise twice as many. 0
    and 1 are added.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        num_mantissas = 2**exponent * (1 if is_signed else 2)
        points = torch.linspace(0.1, 1, num_mantissas + 1, dtype=torch.float64)
        mantissas = (points[1:] + points[:-1]) / 2
        of_power = (mantissas * 10.0 ** (exponent - 6)).tolist()
        values += of_power
        if is_signed:
            values += [-value for value in of_power]
    return torch.tensor(sorted(values), dtype=torch.float32)


def decoded(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """The values of *codes* [n, block] with *scales* [n, 1], in float32."""
    return table[codes.int()] * scales


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The numbers of the entries of the sorted *table* that are nearest to *values*, in int32.

    With a table without negative values, positive values do not get the entry 0, but at least the next one. A second
    moment of 0 with a first moment would change a weight by many times the learning rate, if its gradient is 0: the
    rows of an embedding have no gradient in most steps.
    """
    return torch.bucketize(values, _borders(table), out_int32=True)


def _borders(table: Tensor) -> Tensor:
    """The largest value, as float32 [n - 1], of each entry of *table* [n] but the last one."""
    borders = (table[1:] + table[:-1]) / 2
    # A condition would make the host wait for the device.
    borders[:1] *= table[:1] < 0
    return borders


def lookup_of(table: Tensor, num_bits: int) -> Tensor:
    """A table that replaces the search of :func:`nearest`, in int32 [2^num_bits]: an entry for each value of the first
    *num_bits* bits of a float32 number. It is for tables with at most one border between such numbers.

    Let *shift* be the number of the other bits. Their value is the place of a number, for negative numbers with all
    bits inverted, so that larger numbers have larger places. The code is (entry + place) >> shift, also of numbers
    beyond the table and of NaN.
    """
    shift = 32 - num_bits
    rest = 2**shift - 1
    first_bits = torch.arange(2**num_bits) << shift
    is_negative = first_bits >= 2**31
    smallest = _codes_of(torch.where(is_negative, first_bits + rest, first_bits), table)
    largest = _codes_of(torch.where(is_negative, first_bits, first_bits + rest), table)
    bits = _borders(table).view(torch.int32).long()
    places = (bits ^ (bits >> 31)) & rest
    has_border = largest == smallest + 1
    # The sum with a larger place reaches the next code.
    added = torch.where(has_border, rest - places[smallest.clamp(max=len(places) - 1)], 0)
    # Beside the bits of infinity, there are bits of NaN that is no result of an operation.
    is_infinite = (first_bits & 0x7FFFFFFF) >> 23 == 0xFF
    if not (has_border | (largest == smallest) | is_infinite).all():
        raise ValueError(f"{num_bits} bits do not separate the borders of the table")
    codes = torch.where(has_border, smallest, largest)
    return ((codes << shift) + added).int()


def _codes_of(bits: Tensor, table: Tensor) -> Tensor:
    """The codes of the float32 numbers with these *bits*, of 0 to 2^32 - 1 in int64."""
    signed = bits - (bits >> 31 << 32)
    return nearest(signed.int().view(torch.float32), table).long()
