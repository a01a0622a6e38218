// A head with few tokens, computed with its flow matrix P = q kᵀ.
//
// Flows are sums over rows and columns of P, and the result is α/I P (c V). With few tokens this takes fewer operations
// than S = Σ kᵀ c V, which has D × E numbers. Below, q_i and k_j outside of P denote sums over the features of a token:
//
//     I_i = Σ_j P_ij + ε (q_i + Σ_j k_j) + D ε²           O_j = Σ_i P_ij + ε (k_j + Σ_i q_i) + D ε²
//     Î_i = Σ_j P_ij/O_j + ε (q_i + Σ_j k_j/O_j) + D ε²   Ô_j = Σ_i P_ij/I_i + ε (k_j + Σ_i q_i/I_i) + D ε²
//
// and the norm of a renormalised result is ω_i = Σ_j P_ij c_j + ε (q_i + Σ_j c_j k_j) + D ε².
#pragma once

#include "head.h"

template <class T> struct Short {
    using A = Sum<T>;
    using Head = BidirectionalHead<T>;

    const Call& call;
    const Features<T> features;
    const int64_t D, E;  // padded to whole vectors

    explicit Short(const Call& call)
        : call(call), features(call), D(padded(call.dim, LANES<A>)), E(padded(call.value_dim, LANES<A>)) {}

    // whether the head is short enough: the flow matrix must take fewer operations than S
    bool takes(const Head& h) const {
        const int64_t length = std::max(h.sinks.size, h.sources.size);
        return h.sinks.size > 0 && length <= BLOCK && 2 * length * (D + E) <= 3 * D * E;
    }

    // arrays in `Space` of one number per token, 0 after the last token
    enum { ONES, QUERY, KEY, IN, OUT, CONSERVED_IN, CONSERVED_OUT, ALPHA_DALPHA, FACTOR, COMPETITION, NORM, NUMBERS };

    struct Space {
        A *q, *k, *gradient, *values, *rows, *transposed, *products, *numbers;

        Space(int64_t D, int64_t E, Arena<A>& arena)
            : q(arena.take(BLOCK * D)), k(arena.take(BLOCK * D)), gradient(arena.take(BLOCK * D)),
              values(arena.take(BLOCK * E)), rows(arena.take(BLOCK * E)), transposed(arena.take(BLOCK * std::max(D, E))),
              products(arena.take(BLOCK * BLOCK)), numbers(arena.take(BLOCK * NUMBERS)) {}

        A* operator[](int name) const { return numbers + name * BLOCK; }
    };

    int64_t space_size() const {
        Arena<A> arena;
        Space(D, E, arena);
        return arena.size();
    }

    Space begin(A* space) const {
        Arena<A> arena(space);
        const Space s(D, E, arena);
        std::fill_n(s.numbers, BLOCK * NUMBERS, A(0));
        std::fill_n(s[ONES], BLOCK, A(1));
        return s;
    }

    // x yᵀ, for rows x of the sinks and y of the sources
    void multiply(const Head& h, const A* x, A* y, int64_t width, int64_t length, A* transposed, A* result) const {
        const int64_t columns = padded(h.sources.size, LANES<A>);
        std::fill_n(y + h.sources.size * width, (columns - h.sources.size) * width, A(0));
        transpose(columns, width, y, width, transposed, columns);
        product<A, false, false>(h.sinks.size, columns, length, x, width, transposed, columns, result, columns);
    }

    static A total(int64_t size, const A* x) {
        A sum = 0;
        for (int64_t i = 0; i < size; i++) sum += x[i];
        return sum;
    }

    // Add the terms with ε to a flow that so far is a sum of P. `own`: sum of features of each token; `other`: sum of
    // features of all tokens on the other side
    void add_rest(int64_t size, A* flow, const A* own, A other) const {
        const A eps = A(call.eps), rest = eps * (other + A(call.dim) * eps) + A(call.flow_eps);
        for (int64_t i = 0; i < size; i++) flow[i] += eps * own[i] + rest;
    }

    // load the features, and sum those of each token
    void load_features(const Head& h, const Space& s) const {
        h.queries(features, 0, h.sinks.size, s.q);
        h.keys(features, 0, h.sources.size, s.k);
        sum_rows(h.sinks.size, D, s.q, s[QUERY]);
        sum_rows(h.sources.size, D, s.k, s[KEY]);
    }

    // Ô; `flow` must be zeroed
    void conserved_outgoing(const Head& h, const Space& s, const A* inverse_incoming, A* flow) const {
        const int64_t n = h.sinks.size, m = h.sources.size;
        add_weighted(n, padded(m, LANES<A>), inverse_incoming, h.record, flow);
        add_rest(m, flow, s[KEY], dot(padded(n, LANES<A>), s[QUERY], inverse_incoming));
    }

    // c dc += c_j Σ_i dω_i (P_ij + ε k_j)
    void add_through_norm(int64_t n, int64_t columns, const A* P, const Space& s, A norms, A* c_dc) const {
        for (int64_t c = 0; c < columns; c += LANES<A>) {
            Vector<A> sum = A(call.eps) * norms * load(s[KEY] + c);
            for (int64_t i = 0; i < n; i++) sum += s[NORM][i] * load(P + i * columns + c);
            store(c_dc + c, load(c_dc + c) + load(s[COMPETITION] + c) * sum);
        }
    }

    void forward(const Head& h, A* space) const {
        const int64_t n = h.sinks.size, m = h.sources.size, columns = padded(m, LANES<A>);
        const Space s = begin(space);
        A *P = h.record, *in = s[IN], *out = s[OUT], *conserved_in = s[CONSERVED_IN];
        load_features(h, s);
        multiply(h, s.q, s.k, D, call.dim, s.transposed, P);
        sum_rows(n, columns, P, in);
        add_weighted(n, columns, s[ONES], P, out);
        add_rest(n, in, s[QUERY], total(m, s[KEY]));
        add_rest(m, out, s[KEY], total(n, s[QUERY]));
        for (int64_t i = 0; i < n; i++) h.inverse_incoming[i] = in[i] = 1 / in[i];
        for (int64_t j = 0; j < m; j++) h.inverse_outgoing[j] = out[j] = 1 / out[j];
        std::fill(out + m, out + columns, A(0));
        dots(n, columns, P, out, conserved_in);
        add_rest(n, conserved_in, s[QUERY], dot(columns, s[KEY], out));
        conserved_outgoing(h, s, in, s[CONSERVED_OUT]);
        h.allocate(0, n, conserved_in);
        h.compete(0, m, s[CONSERVED_OUT]);
        if (call.competition == SOFTMAX_COMPETITION) {
            A maximum = -std::numeric_limits<A>::infinity();
            for (int64_t j = 0; j < m; j++) maximum = larger(h.competition[j], maximum);
            const A share = h.share(h.exponentials(0, m, std::isinf(maximum) ? 0 : maximum));
            for (int64_t j = 0; j < m; j++) h.competition[j] *= share;
        }
        if (call.renormalize) {
            A *norm = s[NORM], *weights = s[COMPETITION];
            std::copy_n(h.competition, m, weights);
            dots(n, columns, P, weights, norm);
            add_rest(n, norm, s[QUERY], dot(columns, s[KEY], weights));
            for (int64_t i = 0; i < n; i++) h.inverse_norm[i] = 1 / norm[i];
        }
        h.values(0, m, s.values);
        product<A, false, false>(n, E, m, P, columns, s.values, E, s.rows, E);
        h.write_result(0, n, s.rows, E);
    }

    // With W_ij the gradient of P_ij through the result, the whole gradient is
    //     dP_ij = W_ij + dI_i + dO_j + dÎ_i/O_j + dÔ_j/I_i
    // plus dω_i c_j if renormalised.
    void backward(const Head& h, A* space) const {
        const int64_t n = h.sinks.size, m = h.sources.size, columns = padded(m, LANES<A>);
        const Space s = begin(space);
        const A *P = h.record, eps = A(call.eps);
        A *W = s.products, *in = s[IN], *out = s[OUT], *grad_in = s[CONSERVED_IN], *grad_out = s[CONSERVED_OUT];
        load_features(h, s);
        h.grads(0, n, s[FACTOR], s.rows);
        h.values(0, m, s.values);
        multiply(h, s.rows, s.values, E, call.value_dim, s.transposed, W);
        A *alpha_dalpha = s[ALPHA_DALPHA], *c_dc = s[FACTOR];
        row_dots(n, columns, P, W, alpha_dalpha);
        for (int64_t c = 0; c < columns; c += LANES<A>) {
            Vector<A> sum = {};
            for (int64_t i = 0; i < n; i++) sum += load(P + i * columns + c) * load(W + i * columns + c);
            store(c_dc + c, sum);
        }
        product<A, true, false>(m, E, n, P, columns, s.rows, E, s.values, E);
        h.write_grad_value(0, m, s.values, E);

        const A allocation = h.grad_allocation(0, n, alpha_dalpha, grad_in);  // Σ dÎ
        A grad_tau = 0, grad_gamma = call.powers ? h.grad_gamma(0, n, alpha_dalpha) : A(0);
        A *norm = s[NORM], *weights = s[COMPETITION], norms = 0;  // dω, c and Σ dω
        if (call.renormalize) {
            norms = h.grad_norm(0, n, alpha_dalpha, norm);
            std::copy_n(h.competition, m, weights);
            add_through_norm(n, columns, P, s, norms, c_dc);
            add_outer(n, columns, norm, weights, W);
        }
        h.grad_competition(0, m, c_dc, total(m, c_dc), grad_out);
        if (h.needs_flow()) {
            std::copy_n(h.inverse_incoming, n, in);
            conserved_outgoing(h, s, in, out);
            grad_tau = h.grad_flow(m, out, grad_out);
        }
        call.write_grad_powers(h.index, grad_tau, grad_gamma);
        const A competition = total(m, grad_out);  // Σ dÔ
        std::fill(grad_out + m, grad_out + columns, A(0));
        std::fill_n(out, columns, A(0));
        add_weighted(n, columns, grad_in, P, out);
        for (int64_t j = 0; j < m; j++) {
            const A inverse = h.inverse_outgoing[j];
            out[j] = -(out[j] + eps * s[KEY][j] * allocation) * inverse * inverse;
        }
        dots(n, columns, P, grad_out, in);
        for (int64_t i = 0; i < n; i++) {
            const A inverse = h.inverse_incoming[i];
            in[i] = -(alpha_dalpha[i] + (in[i] + eps * s[QUERY][i] * competition) * inverse) * inverse;
        }
        const A all_in = total(n, in), all_out = total(m, out);

        A* inverse_outgoing = c_dc;
        std::copy_n(h.inverse_outgoing, m, inverse_outgoing);
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < columns; c += LANES<A>) {
                A* w = W + i * columns + c;
                store(w, load(w) + (load(out + c) + in[i]) + grad_in[i] * load(inverse_outgoing + c) +
                             h.inverse_incoming[i] * load(grad_out + c));
            }
        features.with_derivative([&](auto derivative) {
            auto rows = [&](const A* x, A rest, int64_t i) {
                return [=](int64_t c) { return (load(s.gradient + i * D + c) + rest) * derivative(load(x + c)); };
            };
            product<A, false, false>(n, D, m, W, columns, s.k, D, s.gradient, D);
            for (int64_t i = 0; i < n; i++) {
                const A rest = eps * (in[i] + grad_in[i] + norm[i] + all_out + h.inverse_incoming[i] * competition);
                write_row(call.grad_query.at<T>(h.row, h.head, h.sinks.start + i), call.dim,
                          rows(s.q + i * D, rest, i));
            }
            product<A, true, false>(m, D, n, W, columns, s.q, D, s.gradient, D);
            for (int64_t j = 0; j < m; j++) {
                const A rest =
                    eps * (out[j] + grad_out[j] + weights[j] * norms + all_in + inverse_outgoing[j] * allocation);
                h.write_source(call.grad_key, call.dim, h.sources.start + j, rows(s.k + j * D, rest, j));
            }
        });
    }
};
