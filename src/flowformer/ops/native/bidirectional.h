// Bidirectional Flow-Attention: passes over the tokens of a head, forward and backward. The equations are in
// docs/kernels.md.
//
// A pass computes, for each segment of tokens, a partial sum that the next pass needs in whole. A task is a head; where
// there are fewer heads than threads, it is a segment of a head, and threads meet after each pass.
//
// A head with few tokens needs no S = Σ kᵀ c V: there (q kᵀ)(c V) takes fewer steps than q S.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "call.h"

template <class T> struct Bidirectional {
    using A = Sum<T>;

    const Call& call;
    const Features<T> features;
    const int64_t D, E;  // padded to whole vectors

    explicit Bidirectional(const Call& call)
        : call(call), features(call), D(padded(call.dim, LANES<A>)), E(padded(call.value_dim, LANES<A>)) {}

    // one query head of one sequence
    struct Head {
        int64_t sequence, row, head, key_head;  // `row`: of the tensors, 0 for packed sequences
        Span sinks, sources;
        const bool *query_mask, *key_mask;
        A n, m;
        bool is_short;
        A *inverse_incoming, *allocation, *inverse_outgoing, *competition;  // kept, one number a token
        A *sums, *memory;                                                   // kept: Σk, Σq, Σk/O, Σq/I; S
        A *q, *k, *grad_q, *grad_k;                                         // padded rows of all tokens
        A *products, *grad_products, *values, *grads, *turned;              // of a short head: q kᵀ, c V and dR α/I
        A *taken, *grad_conserved_incoming, *grad_conserved_outgoing, *grad_outgoing;
        A* total;  // of the pass at hand
        A *incoming, *outgoing, *conserved_incoming, *conserved_outgoing;  // Σ + ε
        Flow<A> I, O, conserved_I, conserved_O;
        A maximum;
        A *memory_T, *grad_memory, *grad_memory_T, shared_loss;  // shared_loss: ⟨S, dS⟩
        A *grad_conserved_key_sum, *grad_conserved_query_sum, *grad_query_sum, *grad_key_sum;
    };

    static int64_t record_size(const Call& call) {
        return (4 + padded(call.value_dim, LINE<A>)) * padded(call.dim, LINE<A>);
    }

    // backward, those of the first pass stay where they are
    int64_t total_size(bool backward) const { return (D + 8 + D * E) + (backward ? 2 * D + 8 : 0); }

    // lays out what a head needs while it is computed; returns the end
    A* place(Head& h, A* slot, bool backward) const {
        auto take = [&](int64_t size) { return std::exchange(slot, slot + padded(size, LINE<A>)); };
        h.q = take(h.sinks.size * D);
        h.k = take(padded(h.sources.size, LANES<A>) * D);
        for (A** rows : {&h.values, &h.grads}) *rows = take(BLOCK * E);
        for (A** squares : {&h.products, &h.grad_products}) *squares = take(BLOCK * BLOCK);
        h.turned = take(BLOCK * std::max(D, E));
        h.total = take(total_size(backward));
        for (A** vector : {&h.incoming, &h.outgoing, &h.conserved_incoming, &h.conserved_outgoing}) *vector = take(D);
        if (!backward) return slot;
        for (A** vector : {&h.grad_conserved_key_sum, &h.grad_conserved_query_sum, &h.grad_query_sum, &h.grad_key_sum})
            *vector = take(D);
        h.memory_T = take(E * D);
        h.grad_memory_T = take(E * D);
        h.grad_q = take(h.sinks.size * D);
        h.grad_k = take(h.sources.size * D);
        for (A** numbers : {&h.taken, &h.grad_conserved_incoming}) *numbers = take(h.sinks.size);
        for (A** numbers : {&h.grad_conserved_outgoing, &h.grad_outgoing}) *numbers = take(h.sources.size);
        return slot;
    }

    int64_t block_size() const { return 2 * BLOCK * E + 8 * BLOCK; }

    Head begin(int64_t index, A* slot, bool backward) const {
        Head h{};
        h.sequence = index / call.heads;
        h.row = call.sink_bounds ? 0 : h.sequence;
        h.head = index % call.heads;
        h.key_head = h.head / call.shared;
        h.sinks = span(call.sink_bounds, h.sequence, call.sinks);
        h.sources = span(call.source_bounds, h.sequence, call.sources);
        h.query_mask = call.query_mask ? call.query_mask + h.sequence * call.sinks : nullptr;
        h.key_mask = call.key_mask ? call.key_mask + h.sequence * call.sources : nullptr;
        h.n = count(h.query_mask, h.sinks.size);
        h.m = count(h.key_mask, h.sources.size);
        const int64_t length = std::max(h.sinks.size, h.sources.size);
        h.is_short = h.sinks.size > 0 && length <= BLOCK && 2 * length * (D + E) <= 3 * D * E;
        h.inverse_incoming = call.sink_flows.at<A>(h.row, h.head, h.sinks.start);
        h.allocation = h.inverse_incoming + call.sink_plane;
        h.inverse_outgoing = call.source_flows.at<A>(h.row, h.head, h.sources.start);
        h.competition = h.inverse_outgoing + call.source_plane;
        h.sums = (A*)call.records + index * record_size(call);
        h.memory = h.sums + 4 * D;
        place(h, slot, backward);
        if (backward) {
            if (!h.is_short) transpose(D, E, h.memory, E, h.memory_T, D);
            h.conserved_O = Flow<A>(call, h.sums + 3 * D, h.conserved_outgoing);
        }
        return h;
    }

    static A count(const bool* mask, int64_t size) { return mask ? A(std::count(mask, mask + size, true)) : A(size); }

    A ratio(const Head& h) const { return call.rescale ? h.n / std::max(h.m, A(1)) : A(1); }

    // f(first token, how many) for the blocks of a segment
    template <class F> static void blocks(int64_t segment, int64_t size, F f) {
        const int64_t stop = std::min(size, (segment + 1) * SEGMENT);
        for (int64_t t = segment * SEGMENT; t < stop; t += BLOCK) f(t, std::min(BLOCK, stop - t));
    }

    // for each pass forward: the size of its sum, what a segment adds to it, and what the whole sum is for

    enum Forward { SUMS, FLOWS, CONSERVED, MEMORY, RESULT, FORWARD_LEVELS };

    int64_t forward_size(int level, const Head& h) const {
        const int64_t sizes[] = {2 * D, 2 * D, 1, h.is_short ? 1 : 8 + D * E, 0};
        return sizes[level];
    }

    void forward(int level, Head& h, int64_t segment, A* part, A* block) const {
        A *ones = block, *number = block + BLOCK, *rows = block + 8 * BLOCK;
        switch (level) {
            case SUMS:
                std::fill_n(ones, BLOCK, A(1));
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    features(call.key, h.row, h.key_head, h.sources.start + t, tokens, at(h.key_mask, t),
                             h.k + t * D);
                    add_weighted(tokens, D, ones, h.k + t * D, part);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    features(call.query, h.row, h.head, h.sinks.start + t, tokens, at(h.query_mask, t),
                             h.q + t * D);
                    add_weighted(tokens, D, ones, h.q + t * D, part + D);
                });
                break;
            case FLOWS:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    h.O(tokens, D, h.k + t * D, number);
                    for (int64_t i = 0; i < tokens; i++) h.inverse_outgoing[t + i] = number[i] = 1 / number[i];
                    add_weighted(tokens, D, number, h.k + t * D, part);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.I(tokens, D, h.q + t * D, number);
                    for (int64_t i = 0; i < tokens; i++) h.inverse_incoming[t + i] = number[i] = 1 / number[i];
                    add_weighted(tokens, D, number, h.q + t * D, part + D);
                });
                break;
            case CONSERVED:
                part[0] = -std::numeric_limits<A>::infinity();
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    compete(h, t, tokens, number);
                    for (int64_t i = 0; i < tokens; i++) part[0] = number[i] > part[0] ? number[i] : part[0];
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) { allocate(h, t, tokens, number); });
                break;
            case MEMORY:  // Σ exp(Ô), and from 8 on S
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A* c = h.competition + t;
                    if (call.competition == SOFTMAX_COMPETITION) {
                        map_tokens(tokens, c, [&](Vector<A> x) { return exponential<A>(x - h.maximum); });
                        A total = 0;
                        for (int64_t i = 0; i < tokens; i++) total += c[i];
                        part[0] += total;
                    }
                    if (h.is_short) return;
                    scaled_rows<T>(call.value, call.value_dim, h.row, h.key_head, h.sources.start + t, tokens,
                                   at(h.key_mask, t), c, rows);
                    product<A, true, true>(call.dim, E, tokens, h.k + t * D, D, rows, E, part + 8, E);
                });
                break;
            case RESULT:
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    if (h.is_short) {
                        load_values(h);
                        multiply(h, h.q, D, call.dim, h.k, h.products);
                        product<A, false, false>(tokens, E, h.sources.size, h.products, BLOCK, h.values, E, rows, E);
                    } else {
                        product<A, false, false>(tokens, E, call.dim, h.q + t * D, D, h.memory, E, rows, E);
                    }
                    for (int64_t i = 0; i < tokens; i++) {
                        const A received = h.allocation[t + i] * h.inverse_incoming[t + i];
                        write_row(call.result.at<T>(h.row, h.head, h.sinks.start + t + i), call.value_dim,
                                  [&](int64_t c) { return load(rows + i * E + c) * received; });
                    }
                });
        }
    }

    void finish_forward(int level, Head& h) const {
        switch (level) {
            case SUMS:
                std::copy_n(h.total, 2 * D, h.sums);
                h.I = Flow<A>(call, h.sums, h.incoming);
                h.O = Flow<A>(call, h.sums + D, h.outgoing);
                break;
            case FLOWS:
                std::copy_n(h.total, 2 * D, h.sums + 2 * D);
                h.conserved_I = Flow<A>(call, h.sums + 2 * D, h.conserved_incoming);
                h.conserved_O = Flow<A>(call, h.sums + 3 * D, h.conserved_outgoing);
                break;
            case CONSERVED:
                h.maximum = std::isinf(h.total[0]) ? 0 : h.total[0];  // −∞ where no source is valid
                break;
            case MEMORY: {
                A factor = 1;
                if (call.competition == SOFTMAX_COMPETITION) {
                    const A all = h.total[0];
                    factor = all > 0 ? (call.rescale ? h.m : A(1)) / all : A(0);
                    for (int64_t t = 0; t < h.sources.size; t++) h.competition[t] *= factor;
                }
                for (int64_t i = 0; !h.is_short && i < D * E; i++) h.memory[i] = h.total[8 + i] * factor;
            }
        }
    }

    // c V of a short head
    void load_values(const Head& h) const {
        scaled_rows<T>(call.value, call.value_dim, h.row, h.key_head, h.sources.start, h.sources.size, h.key_mask,
                       h.competition, h.values);
    }

    // x yᵀ of a short head: the rows x of its sinks, the rows y of its sources
    static void multiply(const Head& h, const A* x, int64_t width, int64_t length, A* y, A* result) {
        const int64_t columns = padded(h.sources.size, LANES<A>);
        std::fill_n(y + h.sources.size * width, (columns - h.sources.size) * width, A(0));
        transpose(columns, width, y, width, h.turned, BLOCK);
        product<A, false, false>(h.sinks.size, columns, length, x, width, h.turned, BLOCK, result, BLOCK);
    }

    // Ô after the clamp, or c where it is not a softmax; −∞ and 0 where masked
    void compete(Head& h, int64_t t, int64_t tokens, A* number) const {
        const A clamp = A(call.clamp);
        h.conserved_O(tokens, D, h.k + t * D, number);
        if (call.competition == NO_COMPETITION) std::fill_n(number, tokens, A(1));
        else
            map_tokens(tokens, number, [&](Vector<A> x) {
                x = x < -clamp ? all(-clamp) : x;
                x = x > clamp ? all(clamp) : x;
                return call.competition == SIGMOID_COMPETITION ? sigmoid<A>(x) : x;
            });
        const A nothing = call.competition == SOFTMAX_COMPETITION ? -std::numeric_limits<A>::infinity() : A(0);
        if (h.key_mask)
            for (int64_t i = 0; i < tokens; i++) number[i] = h.key_mask[t + i] ? number[i] : nothing;
        std::copy_n(number, tokens, h.competition + t);
    }

    void allocate(Head& h, int64_t t, int64_t tokens, A* number) const {
        if (call.allocation == NO_ALLOCATION) std::fill_n(number, tokens, A(1));
        else {
            const A r = ratio(h);
            h.conserved_I(tokens, D, h.q + t * D, number);
            map_tokens(tokens, number, [&](Vector<A> x) { return sigmoid<A>(x * r); });
        }
        if (h.query_mask)
            for (int64_t i = 0; i < tokens; i++) number[i] = h.query_mask[t + i] ? number[i] : A(0);
        std::copy_n(number, tokens, h.allocation + t);
    }

    // the same for each pass backward

    enum Backward { GRAD_MEMORY, GRAD_COMPETITION, GRAD_QUERY, GRAD_KEY, BACKWARD_LEVELS };

    int64_t backward_size(int level, const Head& h) const {
        const int64_t sizes[] = {h.is_short ? D + 1 : D + 8 + D * E, 2 * D + 2, D + 1, 0};
        return sizes[level];
    }

    void backward(int level, Head& h, int64_t segment, A* part, A* block) const {
        A *number = block, *other = block + BLOCK, *rows = block + 8 * BLOCK, *more = rows + BLOCK * E;
        switch (level) {
            case GRAD_MEMORY:  // Σ dÎ q, Σ dÎ, and from D + 8 on dS
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *grad_q = h.grad_q + t * D, *taken = h.taken + t;
                    features(call.query, h.row, h.head, h.sinks.start + t, tokens, at(h.query_mask, t), q);
                    for (int64_t i = 0; i < tokens; i++) number[i] = h.allocation[t + i] * h.inverse_incoming[t + i];
                    scaled_rows<T>(call.grad, call.value_dim, h.row, h.head, h.sinks.start + t, tokens,
                                   at(h.query_mask, t), number, h.is_short ? h.grads : rows);
                    if (h.is_short) {
                        features(call.key, h.row, h.key_head, h.sources.start, h.sources.size, h.key_mask, h.k);
                        load_values(h);
                        multiply(h, h.grads, E, call.value_dim, h.values, h.grad_products);
                        product<A, false, false>(tokens, D, h.sources.size, h.grad_products, BLOCK, h.k, D, grad_q, D);
                    } else {
                        product<A, true, true>(call.dim, E, tokens, q, D, rows, E, part + D + 8, E);
                        product<A, false, false>(tokens, D, call.value_dim, rows, E, h.memory_T, D, grad_q, D);
                    }
                    row_dots(tokens, D, q, grad_q, taken);
                    A *grad = h.grad_conserved_incoming + t, total = 0;
                    const A r = call.allocation == NO_ALLOCATION ? A(0) : ratio(h);
                    for (int64_t i = 0; i < tokens; i++) total += grad[i] = taken[i] * (1 - h.allocation[t + i]) * r;
                    add_weighted(tokens, D, grad, q, part);
                    part[D] += total;
                });
                break;
            case GRAD_COMPETITION:  // Σ dÔ k, Σ dO k, Σ dÔ, Σ dO
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A *k = h.k + t * D, *c = h.competition + t;
                    if (h.is_short) {
                        grad_short_sources(h, number, more);
                    } else {
                        features(call.key, h.row, h.key_head, h.sources.start + t, tokens, at(h.key_mask, t), k);
                        scaled_rows<T>(call.value, call.value_dim, h.row, h.key_head, h.sources.start + t, tokens,
                                       at(h.key_mask, t), c, rows);
                        product<A, false, false>(tokens, E, call.dim, k, D, h.grad_memory, E, more, E);
                        row_dots(tokens, E, rows, more, number);  // c dc
                        product<A, false, false>(tokens, D, call.value_dim, rows, E, h.grad_memory_T, D,
                                                 h.grad_k + t * D, D);
                    }
                    for (int64_t i = 0; i < tokens; i++)
                        write_source(call.grad_value, call.value_dim, h, h.sources.start + t + i,
                                     [&](int64_t e) { return load(more + i * E + e) * c[i]; });
                    A* grad = h.grad_conserved_outgoing + t;
                    grad_competition(h, t, tokens, number, other, grad);
                    dots(tokens, D, k, h.grad_conserved_key_sum, number);
                    A *grad_out = h.grad_outgoing + t, total = 0, total_out = 0;
                    for (int64_t i = 0; i < tokens; i++) {
                        const A inverse = h.inverse_outgoing[t + i];
                        total += grad[i];
                        total_out += grad_out[i] = -number[i] * inverse * inverse;
                    }
                    add_weighted(tokens, D, grad, k, part);
                    add_weighted(tokens, D, grad_out, k, part + D);
                    part[2 * D] += total;
                    part[2 * D + 1] += total_out;
                });
                break;
            case GRAD_QUERY:  // Σ dI q, Σ dI
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *inverse = h.inverse_incoming + t, total = 0;
                    dots(tokens, D, q, h.grad_conserved_query_sum, number);
                    for (int64_t i = 0; i < tokens; i++)
                        total += number[i] = -(h.taken[t + i] + number[i] * inverse[i]) * inverse[i];
                    add_weighted(tokens, D, number, q, part);
                    part[D] += total;
                    const A* columns[] = {h.grad_conserved_incoming + t, inverse, number};
                    const A* vectors[] = {h.conserved_incoming, h.grad_conserved_query_sum, h.incoming,
                                          h.grad_query_sum};
                    gradient(tokens, h.grad_q + t * D, q, columns, vectors, [&](int64_t i, auto f) {
                        write_row(call.grad_query.at<T>(h.row, h.head, h.sinks.start + t + i), call.dim, f);
                    });
                });
                break;
            case GRAD_KEY:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    const A* columns[] = {h.grad_conserved_outgoing + t, h.inverse_outgoing + t, h.grad_outgoing + t};
                    const A* vectors[] = {h.conserved_outgoing, h.grad_conserved_key_sum, h.outgoing, h.grad_key_sum};
                    gradient(tokens, h.grad_k + t * D, h.k + t * D, columns, vectors, [&](int64_t i, auto f) {
                        write_source(call.grad_key, call.dim, h, h.sources.start + t + i, f);
                    });
                });
        }
    }

    void finish_backward(int level, Head& h) const {
        const A eps = A(call.eps);
        auto add_rest = [&](const A* sum, A rest, A* result) {  // Σ weight x + ε Σ weight
            for (int64_t c = 0; c < D; c++) result[c] = sum[c] + eps * rest;
        };
        switch (level) {
            case GRAD_MEMORY:
                add_rest(h.total, h.total[D], h.grad_conserved_key_sum);
                h.I = Flow<A>(call, h.sums, h.incoming);
                h.O = Flow<A>(call, h.sums + D, h.outgoing);
                h.conserved_I = Flow<A>(call, h.sums + 2 * D, h.conserved_incoming);
                h.grad_memory = h.total + D + 8;
                h.total += D + 8 + D * E;
                if (h.is_short) break;
                transpose(D, E, h.grad_memory, E, h.grad_memory_T, D);
                h.shared_loss = 0;
                for (int64_t d = 0; d < D; d++) {
                    A row = 0;
                    row_dots(1, E, h.memory + d * E, h.grad_memory + d * E, &row);
                    h.shared_loss += row;
                }
                break;
            case GRAD_COMPETITION:
                add_rest(h.total, h.total[2 * D], h.grad_conserved_query_sum);
                add_rest(h.total + D, h.total[2 * D + 1], h.grad_query_sum);
                break;
            case GRAD_QUERY: add_rest(h.total, h.total[D], h.grad_key_sum);
        }
    }

    // of a short head: c dc, dV without c, and dk without what comes by the flows
    void grad_short_sources(Head& h, A* given, A* grad_value) const {
        const int64_t n = h.sinks.size, m = h.sources.size;
        multiply(h, h.q, D, call.dim, h.k, h.products);
        product<A, true, false>(m, E, n, h.products, BLOCK, h.grads, E, grad_value, E);
        product<A, true, false>(m, D, n, h.grad_products, BLOCK, h.q, D, h.grad_k, D);
        row_dots(m, E, h.values, grad_value, given);
        h.shared_loss = 0;
        for (int64_t i = 0; i < m; i++) h.shared_loss += given[i];
    }

    // dÔ from c dc; 0 where the clamp held Ô
    void grad_competition(Head& h, int64_t t, int64_t tokens, const A* given, A* flow, A* grad) const {
        const A *c = h.competition + t, factor = call.rescale ? std::max(h.m, A(1)) : A(1);
        for (int64_t i = 0; i < tokens; i++)
            grad[i] = call.competition == SOFTMAX_COMPETITION ? given[i] - c[i] * (h.shared_loss / factor)
                      : call.competition == SIGMOID_COMPETITION ? given[i] * (1 - c[i])
                                                                : A(0);
        if (std::isinf(call.clamp)) return;
        h.conserved_O(tokens, D, h.k + t * D, flow);
        for (int64_t i = 0; i < tokens; i++)
            if (std::abs(flow[i]) > A(call.clamp)) grad[i] = 0;
    }

    // writes dQ or dK of some tokens: what came by the products, and by the four sums
    template <class Write>
    void gradient(int64_t tokens, const A* grad, const A* x, const A* const* columns, const A* const* vectors,
                  Write write) const {
        const A *c0 = columns[0], *c1 = columns[1], *c2 = columns[2];
        const A *v0 = vectors[0], *v1 = vectors[1], *v2 = vectors[2], *v3 = vectors[3];
        features.with_derivative([&](auto derivative) {
            for (int64_t i = 0; i < tokens; i++)
                write(i, [=](int64_t c) {
                    Vector<A> total = load(grad + i * D + c) + load(v3 + c);
                    total += c0[i] * load(v0 + c) + c1[i] * load(v1 + c) + c2[i] * load(v2 + c);
                    return total * derivative(load(x + i * D + c));
                });
        });
    }

    // gradients of shared key heads are added up by the caller, as sums
    template <class F> void write_source(const Rows& rows, int64_t size, const Head& h, int64_t token, F f) const {
        if (call.shared > 1) write_row(rows.at<A>(h.row, h.head, token), size, f);
        else write_row(rows.at<T>(h.row, h.head, token), size, f);
    }

    static const bool* at(const bool* mask, int64_t t) { return mask ? mask + t : nullptr; }

    void run(bool backward) const {
        int64_t sinks = 0, sources = 0;
        for (int64_t s = 0; s < call.sequences; s++) {
            sinks = std::max(sinks, span(call.sink_bounds, s, call.sinks).size);
            sources = std::max(sources, span(call.source_bounds, s, call.sources).size);
        }
        const int64_t heads = call.sequences * call.heads;
        auto count_segments = [](int64_t n, int64_t m) { return (std::max(n, m) + SEGMENT - 1) / SEGMENT; };
        const int64_t segments = count_segments(sinks, sources);
        const int levels = backward ? int(BACKWARD_LEVELS) : int(FORWARD_LEVELS), threads = workers(call);
        Head longest{};
        longest.sinks.size = sinks;
        longest.sources.size = sources;
        const int64_t slot_size = padded(place(longest, nullptr, backward) - (A*)nullptr, LINE<A>);
        const int64_t block_size = padded(this->block_size(), LINE<A>), part_size = padded(total_size(backward), LINE<A>);
        auto size = [&](int level, const Head& h) {
            return backward ? backward_size(level, h) : forward_size(level, h);
        };
        auto compute = [&](int level, Head& h, int64_t segment, A* part, A* block) {
            std::fill_n(part, size(level, h), A(0));
            backward ? this->backward(level, h, segment, part, block) : forward(level, h, segment, part, block);
        };
        auto fold = [&](int level, Head& h, const A* part) {
            const int64_t count = size(level, h);
            if (!backward && level == CONSERVED) h.total[0] = std::max(h.total[0], part[0]);
            else
                for (int64_t i = 0; i < count; i++) h.total[i] += part[i];
        };
        auto finish = [&](int level, Head& h) { backward ? finish_backward(level, h) : finish_forward(level, h); };

        if (heads >= threads || segments <= 1) {
            const int64_t worker_size = slot_size + block_size + part_size;
            Buffer<A> memory(threads * worker_size);
            Pool::run(heads, threads, [&](int64_t index, int worker) {
                A *slot = memory + worker * worker_size, *block = slot + slot_size, *part = block + block_size;
                Head h = begin(index, slot, backward);
                const int64_t own = count_segments(h.sinks.size, h.sources.size);
                for (int level = 0; level < levels; level++) {
                    compute(level, h, 0, h.total, block);
                    for (int64_t segment = 1; segment < own; segment++) {
                        compute(level, h, segment, part, block);
                        fold(level, h, part);
                    }
                    finish(level, h);
                }
            });
            return;
        }
        Buffer<A> slots(heads * slot_size), parts(heads * segments * part_size), scratch(threads * block_size);
        std::vector<Head> all(heads);
        for (int64_t i = 0; i < heads; i++) all[i] = begin(i, slots + i * slot_size, backward);
        for (int level = 0; level < levels; level++) {
            Pool::run(heads * segments, threads, [&](int64_t index, int worker) {
                Head& h = all[index / segments];
                const int64_t segment = index % segments;
                A* part = segment ? parts + index * part_size : h.total;
                compute(level, h, segment, part, scratch + worker * block_size);
            });
            for (int64_t i = 0; i < heads; i++) {
                for (int64_t segment = 1; segment < segments; segment++)
                    fold(level, all[i], parts + (i * segments + segment) * part_size);
                finish(level, all[i]);
            }
        }
    }
};
