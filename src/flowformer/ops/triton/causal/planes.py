"""Planes: per-token numbers that causal kernels share, each (B, H, N), in one float32 tensor."""

from __future__ import annotations

import triton.language as tl

# the planes of `flows`
INVERSE_INCOMING = tl.constexpr(0)  # 1/I
CONSERVED_OUTGOING = tl.constexpr(1)  # Ô
LOG_OUTGOING = tl.constexpr(2)  # log Σ exp(Ô) since the start of the segment
RECEIVED = tl.constexpr(3)  # α/(I·D)
FORWARD_PLANES = tl.constexpr(4)  # the others are for the backward pass
INVERSE_OUTGOING = tl.constexpr(4)  # 1/O
DECLINED = tl.constexpr(5)  # (1 − α)/D, which times ⟨dR, R⟩ is dÎ/D
COMPETITION_WEIGHT = tl.constexpr(6)  # c
PLANES = tl.constexpr(7)

# With `renormalize`, W = ⟨q, Σ c k⟩ takes the place of I·D in the result. `flows_kernel` then stores α as RECEIVED, and
# two more planes are for the backward pass.
RENORMALIZED_RECEIVED = tl.constexpr(7)  # α/W
INVERSE_COMPETING = tl.constexpr(8)  # 1/W
RENORMALIZED_PLANES = tl.constexpr(9)

# The planes of `grads`. After them come, for each tile of E, the part of ⟨dR, R⟩, then for each tile the part of dÔ/D
# without later segments; then what `gradient_kernel` measures. These are not added up in place: no kernel may write
# what other threads of the same program read.
GRAD_INCOMING = tl.constexpr(0)  # of I·D
GRAD_OUTGOING = tl.constexpr(1)  # of O·D
GRAD_CONSERVED_INCOMING = tl.constexpr(2)  # of Î·D
GRAD_CONSERVED_OUTGOING = tl.constexpr(3)  # of Ô·D
GRAD_PLANES = tl.constexpr(4)

# the sums of a state (4, D) and of a chunk, (5, D) with `renormalize`
KEY_SUM = tl.constexpr(0)  # Σk
QUERY_SUM = tl.constexpr(1)  # Σq
CONSERVED_KEY_SUM = tl.constexpr(2)  # Σk/O
CONSERVED_QUERY_SUM = tl.constexpr(3)  # Σq/I
COMPETING_SUM = tl.constexpr(4)  # Σ c k

# the same as columns of `columns.py`
KEY_COLUMN = tl.constexpr(0)
CONSERVED_KEY_COLUMN = tl.constexpr(1)
QUERY_COLUMN = tl.constexpr(2)
CONSERVED_QUERY_COLUMN = tl.constexpr(3)

# the gradients after each chunk (4, D), (5, D) with `renormalize`
AFTER_QUERY_SUM = tl.constexpr(0)  # dΣq
AFTER_CONSERVED_QUERY_SUM = tl.constexpr(1)  # d(Σq/I)
AFTER_KEY_SUM = tl.constexpr(2)  # dΣk
AFTER_CONSERVED_KEY_SUM = tl.constexpr(3)  # d(Σk/O)
AFTER_COMPETING_SUM = tl.constexpr(4)  # d(Σ c k)

# the scalars of a state (3,)
COUNT = tl.constexpr(0)
STATE_LOG_OUTGOING = tl.constexpr(1)
STATE_LOG_INCOMING = tl.constexpr(2)
