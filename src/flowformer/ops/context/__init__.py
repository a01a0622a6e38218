"""Context parallelism: a sequence is split over the ranks of a process group.

In Flow-Attention a token depends on the others only through sums, so ranks exchange a few numbers per head, whatever
the length. With Σ over the tokens of all ranks, and [·] for one exchange:

    bidirectional   [Σk, Σq, n, m]  →  I, O   [Σk/O, Σq/I]  →  Î, Ô   [log Σ exp(Ô), S = Σ kᵀ c V]  →  R
    its gradient    [dS]  →  dÎ, dÔ   [Σ dÎ q, Σ dÔ k]  →  dI, dO   [Σ dI q, Σ dO k]  →  dQ, dK, dV

S is merged as in any split softmax: each rank uses the softmax over its own tokens, and the ranks exchange their
log-sum-exp. The sum in the gradient of that softmax is ⟨S, dS⟩, so it needs no further exchange.

Causal attention needs the same sums over the tokens of *earlier* ranks, which form a `FlowState`. Each level of it
depends on the previous one:

    [Σk, Σq, count]  →  I, O   [Σk/O, Σq/I]  →  Î, Ô   [log Σ exp(Ô)]  →  c   [S]  →  R

Its gradient takes the same exchanges in reverse, as sums over *later* ranks. The Triton kernels run once, with the
exchanges between them (`ops/triton/causal/cut.py`). With other backends, a rank computes each level by running the
recurrent op over its tokens with a state that is complete up to the previous level, so the flows are computed four
times.

`op.py` checks the arguments and chooses the implementation, `exchange.py` has the collectives, the other files compute
the sums of one rank.
"""
