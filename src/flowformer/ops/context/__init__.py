"""Context parallelism: one sequence cut over the ranks of a process group, each rank holding its part.

Flow-Attention needs of the other tokens only sums, so ranks exchange a few numbers per head, whatever the length. With
Σ over the tokens of all ranks, and [·] for one exchange:

    bidirectional   [Σk, Σq, n, m]  →  I, O   [Σk/O, Σq/I]  →  Î, Ô   [log Σ exp(Ô), S = Σ kᵀ c V]  →  R
    its gradient    [dS]  →  dÎ, dÔ   [Σ dÎ q, Σ dÔ k]  →  dI, dO   [Σ dI q, Σ dO k]  →  dQ, dK, dV

S is summed with the softmax of each rank's own tokens and the ranks' logarithms, as in any split softmax. ⟨S, dS⟩ is
the sum that the gradient of that softmax needs, so it takes no exchange of its own.

Causal attention needs the same sums over the tokens of the ranks *before*, which are a `FlowState`. Each level of it
depends on the one above:

    [Σk, Σq, count]  →  I, O   [Σk/O, Σq/I]  →  Î, Ô   [log Σ exp(Ô)]  →  c   [S]  →  R

Its gradient goes through the same exchanges in reverse, as sums over the ranks *after*. The Triton kernels run once,
with the exchanges between them (`ops/triton/causal/cut.py`). With other backends, a rank finds each level by running
the recurrent op over its tokens, with a state that is complete down to the level above, so the flows are computed four
times.

`op.py` checks and chooses, `exchange.py` has the collectives, the other files the sums.
"""
