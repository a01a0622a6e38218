"""Records: the sums of one segment of a head in bidirectional attention and, once finished, of the whole head.

A record is S (D, E), then four vectors (4, D), then four scalars, all float32:
    forward   S | Σk, Σq, Σk/O, Σq/I | m, n, reference, Σ exp(Ô − reference); of a finished head μ, r, reference, 1/Z
    backward  dS | dΣk, dΣq, d(Σk/O), d(Σq/I) | unused
A finished head keeps S as a mean, S/μ, so that it does not grow with the length:
c = μ exp(Ô − reference)/Z and α = σ(r·Î).
"""

from __future__ import annotations

import triton
import triton.language as tl

# the vectors
KEY_SUM = tl.constexpr(0)  # Σk
QUERY_SUM = tl.constexpr(1)  # Σq
CONSERVED_KEY_SUM = tl.constexpr(2)  # Σk/O
CONSERVED_QUERY_SUM = tl.constexpr(3)  # Σq/I

# the scalars of a segment
SOURCES = tl.constexpr(0)  # m
SINKS = tl.constexpr(1)  # n
REFERENCE = tl.constexpr(2)  # subtracted from Ô before exp
MASS = tl.constexpr(3)  # Σ exp(Ô − reference)

# the scalars of a finished head, where they differ
FACTOR = tl.constexpr(0)  # μ
RATIO = tl.constexpr(1)  # r
INVERSE_MASS = tl.constexpr(3)  # 1/Z


def record_size(dim: int, value_dim: int) -> int:
    """The size of a record; `record_at` computes the same in a kernel."""
    return dim * value_dim + 4 * dim + 4


@triton.jit
def record_at(p_records, index, D: tl.constexpr, E: tl.constexpr):
    """A pointer to record `index`: to the first number of its S."""
    return p_records + index * (D * E + 4 * D + 4)


@triton.jit
def vector_at(p_record, WHICH: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """A pointer to one of the vectors."""
    return p_record + (D * E + WHICH * D)


@triton.jit
def scalar_at(p_record, WHICH: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """A pointer to one of the scalars."""
    return p_record + (D * E + 4 * D + WHICH)


@triton.jit
def load_vector(p_record, WHICH: tl.constexpr, columns, D: tl.constexpr, E: tl.constexpr):
    return tl.load(vector_at(p_record, WHICH, D, E) + columns, mask=columns < D, other=0.0)


@triton.jit
def sum_segments(
    p_part, segments, columns, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """The sum of WIDTH numbers over the records of a head's segments, always in the same order.

    p_part points into the record of the first segment.
    """
    total = tl.zeros((columns.shape[0],), tl.float32)
    for start in range(0, segments, AT_ONCE):
        segment = start + tl.arange(0, AT_ONCE)
        keep = (segment < segments)[:, None] & (columns < WIDTH)[None, :]
        total += tl.sum(tl.load(record_at(p_part, segment[:, None], D, E) + columns[None, :], mask=keep, other=0.0), 0)
    return total


@triton.jit
def sum_vector(p_records, WHICH: tl.constexpr, segments, columns, D: tl.constexpr, E: tl.constexpr):
    """One of the vectors, summed over the records of a head's segments."""
    return sum_segments(vector_at(p_records, WHICH, D, E), segments, columns, D, 16, D, E)
