// Bidirectional Flow-Attention: passes over the tokens of a head, forward and backward. The equations are in
// docs/kernels.md.
//
// Each pass computes a partial sum for every segment of tokens; the next pass needs the sum over all segments. A task
// is a head or, if there are fewer heads than threads, a segment of a head, with a barrier after each pass. A head with
// few tokens is computed in one go (`short.h`).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "short.h"

template <class T> struct Bidirectional {
    using A = Sum<T>;

    const Call& call;
    const Features<T> features;
    const Short<T> short_heads;
    const int64_t D, E;            // padded to whole vectors
    const int64_t competing_size;  // size of Σ c k, 0 unless renormalised

    explicit Bidirectional(const Call& call)
        : call(call), features(call), short_heads(call), D(padded(call.dim, LANES<A>)),
          E(padded(call.value_dim, LANES<A>)), competing_size(call.renormalize ? D : 0) {}

    // one query head of one sequence
    struct Head : BidirectionalHead<T> {
        A *sums, *memory;            // in the record: Σk, Σq, Σk/O, Σq/I, if renormalised Σ c k; S
        A *q, *k, *grad_q, *grad_k;  // features of all tokens and their gradients, in padded rows
        A *alpha_dalpha, *grad_conserved_incoming, *grad_conserved_outgoing, *grad_outgoing;
        A* total;  // the sum of the current pass over all segments
        A *incoming, *outgoing, *conserved_incoming, *conserved_outgoing, *competing;  // Σ + ε, used by the flows below
        Flow<A> I, O, conserved_I, conserved_O, norm;
        A maximum;
        A *memory_T, *grad_memory, *grad_memory_T, shared_loss;  // shared_loss: Σ c dc
        A *grad_conserved_key_sum, *grad_conserved_query_sum, *grad_query_sum, *grad_key_sum, *grad_competing_sum;
        A grad_power;  // dγ, stored until dτ is computed
    };

    // size of `total`; in the backward pass the sums of the first pass are kept, and those of later passes follow them
    int64_t total_size(bool backward) const { return (D + 8 + D * E + competing_size) + (backward ? 2 * D + 8 : 0); }

    // divide the scratch memory of a head into its buffers; returns the end
    A* lay_out(Head& h, A* slot, bool backward) const {
        auto take = [&](int64_t size) { return std::exchange(slot, slot + padded(size, LINE<A>)); };
        h.q = take(h.sinks.size * D);
        h.k = take(h.sources.size * D);
        h.total = take(total_size(backward));
        for (A** vector : {&h.incoming, &h.outgoing, &h.conserved_incoming, &h.conserved_outgoing, &h.competing})
            *vector = take(D);
        if (!backward) return slot;
        for (A** vector : {&h.grad_conserved_key_sum, &h.grad_conserved_query_sum, &h.grad_query_sum, &h.grad_key_sum,
                           &h.grad_competing_sum})
            *vector = take(D);
        h.memory_T = take(E * D);
        h.grad_memory_T = take(E * D);
        h.grad_q = take(h.sinks.size * D);
        h.grad_k = take(h.sources.size * D);
        for (A** numbers : {&h.alpha_dalpha, &h.grad_conserved_incoming}) *numbers = take(h.sinks.size);
        for (A** numbers : {&h.grad_conserved_outgoing, &h.grad_outgoing}) *numbers = take(h.sources.size);
        return slot;
    }

    int64_t block_size() const { return 2 * BLOCK * E + 8 * BLOCK; }

    Head begin(const BidirectionalHead<T>& base, A* slot, bool backward) const {
        Head h{base};
        h.sums = h.record;
        h.memory = h.sums + 4 * D + competing_size;
        lay_out(h, slot, backward);
        if (backward) {
            transpose(D, E, h.memory, E, h.memory_T, D);
            h.conserved_O = Flow<A>(call, h.sums + 3 * D, h.conserved_outgoing);
            if (call.renormalize) h.norm = Flow<A>(call, h.sums + 4 * D, h.competing);
        }
        return h;
    }

    // call f(first token, number of tokens) for each block of a segment
    template <class F> static void blocks(int64_t segment, int64_t size, F f) {
        const int64_t stop = std::min(size, (segment + 1) * SEGMENT);
        for (int64_t t = segment * SEGMENT; t < stop; t += BLOCK) f(t, std::min(BLOCK, stop - t));
    }

    // The passes of the forward direction. `forward_size` is the size of a pass's sum, `forward` computes the partial
    // sum of a segment, and `finish_forward` uses the whole sum.

    enum Forward { SUMS, FLOWS, CONSERVED, MEMORY, RESULT, FORWARD_LEVELS };

    int64_t forward_size(int level) const {
        const int64_t sizes[] = {2 * D, 2 * D, 1, 8 + D * E + competing_size, 0};
        return sizes[level];
    }

    void forward(int level, Head& h, int64_t segment, A* part, A* block) const {
        A *ones = block, *number = block + BLOCK, *rows = block + 8 * BLOCK;
        switch (level) {
            case SUMS:
                std::fill_n(ones, BLOCK, A(1));
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    h.keys(features, t, tokens, h.k + t * D);
                    add_weighted(tokens, D, ones, h.k + t * D, part);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.queries(features, t, tokens, h.q + t * D);
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
                    h.conserved_O(tokens, D, h.k + t * D, number);
                    h.compete(t, tokens, number);
                    for (int64_t i = 0; i < tokens; i++) part[0] = larger(number[i], part[0]);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.conserved_I(tokens, D, h.q + t * D, number);
                    h.allocate(t, tokens, number);
                });
                break;
            case MEMORY:  // part[0]: Σ exp(τ Ô − maximum); from part[8] on: S, then Σ c k
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    if (call.competition == SOFTMAX_COMPETITION) part[0] += h.exponentials(t, tokens, h.maximum);
                    h.values(t, tokens, rows);
                    product<A, true, true>(call.dim, E, tokens, h.k + t * D, D, rows, E, part + 8, E);
                    if (call.renormalize) add_weighted(tokens, D, h.competition + t, h.k + t * D, part + 8 + D * E);
                });
                break;
            case RESULT:
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    product<A, false, false>(tokens, E, call.dim, h.q + t * D, D, h.memory, E, rows, E);
                    if (call.renormalize) {
                        h.norm(tokens, D, h.q + t * D, number);
                        for (int64_t i = 0; i < tokens; i++) h.inverse_norm[t + i] = 1 / number[i];
                    }
                    h.write_result(t, tokens, rows, E);
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
                    factor = h.share(h.total[0]);
                    for (int64_t t = 0; t < h.sources.size; t++) h.competition[t] *= factor;
                }
                for (int64_t i = 0; i < D * E; i++) h.memory[i] = h.total[8 + i] * factor;
                for (int64_t i = 0; i < competing_size; i++) h.sums[4 * D + i] = h.total[8 + D * E + i] * factor;
                if (call.renormalize) h.norm = Flow<A>(call, h.sums + 4 * D, h.competing);
            }
        }
    }

    // The passes of the backward direction, likewise.

    enum Backward { GRAD_MEMORY, GRAD_COMPETITION, GRAD_FLOWS, GRAD_QUERY, GRAD_KEY, BACKWARD_LEVELS };

    int64_t backward_size(int level) const {
        const int64_t sizes[] = {D + 8 + D * E + competing_size, 1, 2 * D + 3, D + 1, 0};
        return sizes[level];
    }

    void backward(int level, Head& h, int64_t segment, A* part, A* block) const {
        A *number = block, *rows = block + 8 * BLOCK, *more = rows + BLOCK * E;
        switch (level) {
            case GRAD_MEMORY:  // part: Σ dÎ q; [D]: Σ dÎ, Σ of the norms' gradients, dγ; [D + 8]: dS, then d(Σ c k)
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *grad_q = h.grad_q + t * D, *grad = h.grad_conserved_incoming + t;
                    h.queries(features, t, tokens, q);
                    h.grads(t, tokens, number, rows);
                    product<A, true, true>(call.dim, E, tokens, q, D, rows, E, part + D + 8, E);
                    product<A, false, false>(tokens, D, call.value_dim, rows, E, h.memory_T, D, grad_q, D);
                    row_dots(tokens, D, q, grad_q, h.alpha_dalpha + t);
                    part[D] += h.grad_allocation(t, tokens, h.alpha_dalpha + t, grad);
                    add_weighted(tokens, D, grad, q, part);
                    if (call.powers) part[D + 2] += h.grad_gamma(t, tokens, h.alpha_dalpha + t);
                    if (call.renormalize) {
                        part[D + 1] += h.grad_norm(t, tokens, h.alpha_dalpha + t, number);
                        add_weighted(tokens, D, number, q, part + D + 8 + D * E);
                        add_outer(tokens, D, number, h.competing, grad_q);
                    }
                });
                break;
            case GRAD_COMPETITION:  // part[0]: Σ c dc
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A *k = h.k + t * D, *c_dc = h.grad_conserved_outgoing + t;
                    h.keys(features, t, tokens, k);
                    h.values(t, tokens, rows);
                    product<A, false, false>(tokens, E, call.dim, k, D, h.grad_memory, E, more, E);
                    row_dots(tokens, E, rows, more, c_dc);
                    product<A, false, false>(tokens, D, call.value_dim, rows, E, h.grad_memory_T, D, h.grad_k + t * D,
                                             D);
                    h.write_grad_value(t, tokens, more, E);
                    if (call.renormalize) {
                        dots(tokens, D, k, h.grad_competing_sum, number);
                        for (int64_t i = 0; i < tokens; i++) c_dc[i] += h.competition[t + i] * number[i];
                        add_outer(tokens, D, h.competition + t, h.grad_competing_sum, h.grad_k + t * D);
                    }
                    Wide<A> total = 0;
                    for (int64_t i = 0; i < tokens; i++) total += c_dc[i];
                    part[0] += A(total);
                });
                break;
            case GRAD_FLOWS:  // part: Σ dÔ k, Σ dO k; [2 D]: Σ dÔ, Σ dO, dτ
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A *k = h.k + t * D, *grad = h.grad_conserved_outgoing + t;
                    h.grad_competition(t, tokens, grad, h.shared_loss, grad);
                    if (h.needs_flow()) {
                        h.conserved_O(tokens, D, k, number);
                        part[2 * D + 2] += h.grad_flow(tokens, number, grad);
                    }
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
            case GRAD_QUERY:  // part: Σ dI q; [D]: Σ dI
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *inverse = h.inverse_incoming + t, total = 0;
                    dots(tokens, D, q, h.grad_conserved_query_sum, number);
                    for (int64_t i = 0; i < tokens; i++)
                        total += number[i] = -(h.alpha_dalpha[t + i] + number[i] * inverse[i]) * inverse[i];
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
                        h.write_source(call.grad_key, call.dim, h.sources.start + t + i, f);
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
                transpose(D, E, h.grad_memory, E, h.grad_memory_T, D);
                if (call.renormalize) add_rest(h.grad_memory + D * E, h.total[D + 1], h.grad_competing_sum);
                h.grad_power = h.total[D + 2];
                h.total += D + 8 + D * E + competing_size;
                break;
            case GRAD_COMPETITION: h.shared_loss = h.total[0]; break;
            case GRAD_FLOWS:
                add_rest(h.total, h.total[2 * D], h.grad_conserved_query_sum);
                add_rest(h.total + D, h.total[2 * D + 1], h.grad_query_sum);
                call.write_grad_powers(h.index, h.total[2 * D + 2], h.grad_power);
                break;
            case GRAD_QUERY: add_rest(h.total, h.total[D], h.grad_key_sum);
        }
    }

    // Write dQ or dK of consecutive tokens: `grad` (the gradient through S) plus the gradients through the four flows,
    // column_i · vector, where vectors[3] has no column
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

    // compute the head by `short.h` if it is short; returns whether it was
    bool run_short(const BidirectionalHead<T>& h, A* space, bool backward) const {
        if (!short_heads.takes(h)) return false;
        backward ? short_heads.backward(h, space) : short_heads.forward(h, space);
        return true;
    }

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
        const int64_t slot_size = padded(lay_out(longest, nullptr, backward) - (A*)nullptr, LINE<A>);
        const int64_t block_size = padded(this->block_size(), LINE<A>);
        const int64_t part_size = padded(total_size(backward), LINE<A>);
        auto size = [&](int level) { return backward ? backward_size(level) : forward_size(level); };
        auto compute = [&](int level, Head& h, int64_t segment, A* part, A* block) {
            std::fill_n(part, size(level), A(0));
            backward ? this->backward(level, h, segment, part, block) : forward(level, h, segment, part, block);
        };
        auto fold = [&](int level, Head& h, const A* part) {
            if (!backward && level == CONSERVED) h.total[0] = std::max(h.total[0], part[0]);
            else
                for (int64_t i = 0; i < size(level); i++) h.total[i] += part[i];
        };
        auto finish = [&](int level, Head& h) { backward ? finish_backward(level, h) : finish_forward(level, h); };

        advise_results<T>(call, backward);
        if (heads >= threads || segments <= 1) {
            const int64_t worker_size = std::max(slot_size + block_size + part_size, Short<T>::space(call));
            Buffer<A> memory(threads * worker_size);
            Pool::run(heads, threads, [&](int64_t index, int worker) {
                A *slot = memory + worker * worker_size, *block = slot + slot_size, *part = block + block_size;
                const auto base = BidirectionalHead<T>::of(call, index);
                if (run_short(base, slot, backward)) return;
                Head h = begin(base, slot, backward);
                const int64_t own = count_segments(h.sinks.size, h.sources.size);
                for (int level = 0; level < levels; level++) {
                    compute(level, h, 0, h.total, block);
                    for (int64_t segment = 1; segment < own; segment++) {
                        compute(level, h, segment, part, block);
                        fold(level, h, part);
                    }
                    finish(level, h);
                }
            }, neighbours(call, heads, threads));
            return;
        }
        Buffer<A> memory(heads * (slot_size + segments * part_size) + threads * block_size);
        A *parts = memory + heads * slot_size, *scratch = parts + heads * segments * part_size;
        std::vector<Head> all;
        for (int64_t i = 0; i < heads; i++) {
            const auto base = BidirectionalHead<T>::of(call, i);
            A* slot = memory + all.size() * slot_size;  // more than a segment of tokens: enough for a short head
            if (!run_short(base, slot, backward)) all.push_back(begin(base, slot, backward));
        }
        for (int level = 0; level < levels; level++) {
            Pool::run(all.size() * segments, threads, [&](int64_t index, int worker) {
                Head& h = all[index / segments];
                const int64_t segment = index % segments;
                A* part = segment ? parts + index * part_size : h.total;
                compute(level, h, segment, part, scratch + worker * block_size);
            });
            for (size_t i = 0; i < all.size(); i++) {
                for (int64_t segment = 1; segment < segments; segment++)
                    fold(level, all[i], parts + (i * segments + segment) * part_size);
                finish(level, all[i]);
            }
        }
    }
};
