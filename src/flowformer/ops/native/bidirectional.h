// Bidirectional Flow-Attention: passes over the tokens of a head, forward and backward. The equations are in
// docs/kernels.md.
//
// Each pass computes a partial sum for every segment of tokens; the next pass needs the sum over all segments. A task
// is a head or, if there are fewer heads than threads, a segment of a head, with a barrier after each pass. A head with
// few tokens is computed in one go (`short.h`).
#pragma once

#include <algorithm>
#include <vector>

#include "short.h"

template <class T> struct Bidirectional {
    using A = Sum<T>;

    const Call& call;
    const Features<T> features;
    const Short<T> short_heads;
    const int64_t D, E;  // padded to whole vectors

    explicit Bidirectional(const Call& call)
        : call(call), features(call), short_heads(call), D(padded(call.dim, LANES<A>)),
          E(padded(call.value_dim, LANES<A>)) {}

    // The record of a pass: its sums over a segment or, as `total` of a head, over all tokens. Each pass uses some of
    // them. The matrix is last, so that passes without a matrix do not overwrite dS.
    struct Record {
        struct alignas(64) Scalars {
            A maximum;                // of τ Ô
            A exponentials;           // Σ exp(τ Ô − maximum)
            A weights[FEATURE_SUMS];  // Σ weight, where the gradient of a sum of features is Σ weight (x + ε)
            A shared_loss;            // Σ c dc
            A grad_tau, grad_gamma;
        };
        Scalars* scalars;
        FeatureSums<A> sums;  // in the backward direction Σ weight x, see `weights`
        A* matrix;            // S or dS

        Record() = default;
        Record(A* start, int64_t D)
            : scalars((Scalars*)start), sums{start + sizeof(Scalars) / sizeof(A), D}, matrix(sums[FEATURE_SUMS]) {}

        A* begin() const { return (A*)scalars; }
    };

    int64_t record_size(bool with_matrix) const {
        return sizeof(typename Record::Scalars) / sizeof(A) + FEATURE_SUMS * D + (with_matrix ? D * E : 0);
    }

    // one query head of one sequence
    struct Head : BidirectionalHead<T> {
        FeatureSums<A> sums;         // kept for the backward pass
        A* memory;                   // S, likewise
        A *q, *k, *grad_q, *grad_k;  // features of all tokens and their gradients, in padded rows
        A *alpha_dalpha, *grad_conserved_incoming, *grad_conserved_outgoing, *grad_outgoing;
        Record total;           // of the current pass
        FeatureSums<A> raised;  // Σ + ε, used by the flows below
        Flow<A> I, O, conserved_I, conserved_O, norm;
        A maximum;
        A *memory_T, *grad_memory_T, shared_loss;  // shared_loss: Σ c dc
        FeatureSums<A> grad_sums;
        A grad_power;  // dγ, stored until dτ is computed
    };

    // divide the scratch memory of a head into its buffers
    void lay_out(Head& h, Arena<A>& arena, bool backward) const {
        h.q = arena.take(h.sinks.size * D);
        h.k = arena.take(h.sources.size * D);
        h.total = Record(arena.take(record_size(true)), D);
        h.raised = {arena.take(FEATURE_SUMS * D), D};
        if (!backward) return;
        h.grad_sums = {arena.take(FEATURE_SUMS * D), D};
        h.memory_T = arena.take(E * D);
        h.grad_memory_T = arena.take(E * D);
        h.grad_q = arena.take(h.sinks.size * D);
        h.grad_k = arena.take(h.sources.size * D);
        for (A** numbers : {&h.alpha_dalpha, &h.grad_conserved_incoming}) *numbers = arena.take(h.sinks.size);
        for (A** numbers : {&h.grad_conserved_outgoing, &h.grad_outgoing}) *numbers = arena.take(h.sources.size);
    }

    // scratch memory of a worker, for the tokens of a block: numbers, and rows of E
    struct Block {
        A *ones, *number, *rows, *more_rows;

        Block(int64_t E, Arena<A>& arena)
            : ones(arena.take(BLOCK)), number(arena.take(BLOCK)), rows(arena.take(BLOCK * E)),
              more_rows(arena.take(BLOCK * E)) {}
    };

    // the flow through one of the sums of features of a head
    Flow<A> flow(const Head& h, FeatureSum which) const { return Flow<A>(call, h.sums[which], h.raised[which]); }

    Head begin(const BidirectionalHead<T>& base, A* slot, bool backward) const {
        Head h{base};
        h.sums = {h.record, D};
        h.memory = h.sums[call.feature_sums()];  // follows the sums
        Arena<A> arena(slot);
        lay_out(h, arena, backward);
        if (backward) {
            transpose(D, E, h.memory, E, h.memory_T, D);
            h.conserved_O = flow(h, CONSERVED_QUERY_SUM);
            if (call.renormalize) h.norm = flow(h, COMPETING_SUM);
        }
        return h;
    }

    // call f(first token, number of tokens) for each block of a segment
    template <class F> static void blocks(int64_t segment, int64_t size, F f) {
        const int64_t stop = std::min(size, (segment + 1) * SEGMENT);
        for (int64_t t = segment * SEGMENT; t < stop; t += BLOCK) f(t, std::min(BLOCK, stop - t));
    }

    // The passes of the forward direction. `forward` adds the sums of a segment to `part`, and `finish_forward` uses
    // those of all tokens, in `h.total`.

    enum Forward { SUMS, FLOWS, CONSERVED, MEMORY, RESULT, FORWARD_LEVELS };

    void forward(int level, Head& h, int64_t segment, const Record& part, const Block& block) const {
        A *number = block.number, *rows = block.rows;
        switch (level) {
            case SUMS:
                std::fill_n(block.ones, BLOCK, A(1));
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    h.keys(features, t, tokens, h.k + t * D);
                    add_weighted(tokens, D, block.ones, h.k + t * D, part.sums[KEY_SUM]);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.queries(features, t, tokens, h.q + t * D);
                    add_weighted(tokens, D, block.ones, h.q + t * D, part.sums[QUERY_SUM]);
                });
                break;
            case FLOWS:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    h.O(tokens, D, h.k + t * D, number);
                    for (int64_t i = 0; i < tokens; i++) h.inverse_outgoing[t + i] = number[i] = 1 / number[i];
                    add_weighted(tokens, D, number, h.k + t * D, part.sums[CONSERVED_KEY_SUM]);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.I(tokens, D, h.q + t * D, number);
                    for (int64_t i = 0; i < tokens; i++) h.inverse_incoming[t + i] = number[i] = 1 / number[i];
                    add_weighted(tokens, D, number, h.q + t * D, part.sums[CONSERVED_QUERY_SUM]);
                });
                break;
            case CONSERVED: {
                A& maximum = part.scalars->maximum = -std::numeric_limits<A>::infinity();
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    h.conserved_O(tokens, D, h.k + t * D, number);
                    h.compete(t, tokens, number);
                    for (int64_t i = 0; i < tokens; i++) maximum = larger(number[i], maximum);
                });
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    h.conserved_I(tokens, D, h.q + t * D, number);
                    h.allocate(t, tokens, number);
                });
                break;
            }
            case MEMORY:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    if (call.competition == SOFTMAX_COMPETITION)
                        part.scalars->exponentials += h.exponentials(t, tokens, h.maximum);
                    h.values(t, tokens, rows);
                    product<A, true, true>(call.dim, E, tokens, h.k + t * D, D, rows, E, part.matrix, E);
                    if (call.renormalize)
                        add_weighted(tokens, D, h.competition + t, h.k + t * D, part.sums[COMPETING_SUM]);
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
        auto keep = [&](FeatureSum which) {
            std::copy_n(h.total.sums[which], D, h.sums[which]);
            return flow(h, which);
        };
        switch (level) {
            case SUMS:
                h.I = keep(KEY_SUM);
                h.O = keep(QUERY_SUM);
                break;
            case FLOWS:
                h.conserved_I = keep(CONSERVED_KEY_SUM);
                h.conserved_O = keep(CONSERVED_QUERY_SUM);
                break;
            case CONSERVED:
                h.maximum = h.total.scalars->maximum;
                if (std::isinf(h.maximum)) h.maximum = 0;  // −∞ where no source is valid
                break;
            case MEMORY: {
                A factor = 1;
                if (call.competition == SOFTMAX_COMPETITION) {
                    factor = h.share(h.total.scalars->exponentials);
                    for (int64_t t = 0; t < h.sources.size; t++) h.competition[t] *= factor;
                }
                for (int64_t i = 0; i < D * E; i++) h.memory[i] = h.total.matrix[i] * factor;
                if (call.renormalize) {
                    for (int64_t c = 0; c < D; c++) h.total.sums[COMPETING_SUM][c] *= factor;
                    h.norm = keep(COMPETING_SUM);
                }
            }
        }
    }

    // The passes of the backward direction, likewise.

    enum Backward { GRAD_MEMORY, GRAD_COMPETITION, GRAD_FLOWS, GRAD_QUERY, GRAD_KEY, BACKWARD_LEVELS };

    void backward(int level, Head& h, int64_t segment, const Record& part, const Block& block) const {
        A *number = block.number, *rows = block.rows, *more = block.more_rows;
        A* weights = part.scalars->weights;
        switch (level) {
            case GRAD_MEMORY:  // the weights of d(Σk/O) are dÎ, those of d(Σ c k) are the gradients of the norms
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *grad_q = h.grad_q + t * D, *grad = h.grad_conserved_incoming + t;
                    h.queries(features, t, tokens, q);
                    h.grads(t, tokens, number, rows);
                    product<A, true, true>(call.dim, E, tokens, q, D, rows, E, part.matrix, E);
                    product<A, false, false>(tokens, D, call.value_dim, rows, E, h.memory_T, D, grad_q, D);
                    row_dots(tokens, D, q, grad_q, h.alpha_dalpha + t);
                    weights[CONSERVED_KEY_SUM] += h.grad_allocation(t, tokens, h.alpha_dalpha + t, grad);
                    add_weighted(tokens, D, grad, q, part.sums[CONSERVED_KEY_SUM]);
                    if (call.powers) part.scalars->grad_gamma += h.grad_gamma(t, tokens, h.alpha_dalpha + t);
                    if (call.renormalize) {
                        weights[COMPETING_SUM] += h.grad_norm(t, tokens, h.alpha_dalpha + t, number);
                        add_weighted(tokens, D, number, q, part.sums[COMPETING_SUM]);
                        add_outer(tokens, D, number, h.raised[COMPETING_SUM], grad_q);
                    }
                });
                break;
            case GRAD_COMPETITION:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A *k = h.k + t * D, *c_dc = h.grad_conserved_outgoing + t;
                    h.keys(features, t, tokens, k);
                    h.values(t, tokens, rows);
                    product<A, false, false>(tokens, E, call.dim, k, D, h.total.matrix, E, more, E);
                    row_dots(tokens, E, rows, more, c_dc);
                    product<A, false, false>(tokens, D, call.value_dim, rows, E, h.grad_memory_T, D, h.grad_k + t * D,
                                             D);
                    h.write_grad_value(t, tokens, more, E);
                    if (call.renormalize) {
                        dots(tokens, D, k, h.grad_sums[COMPETING_SUM], number);
                        for (int64_t i = 0; i < tokens; i++) c_dc[i] += h.competition[t + i] * number[i];
                        add_outer(tokens, D, h.competition + t, h.grad_sums[COMPETING_SUM], h.grad_k + t * D);
                    }
                    Wide<A> total = 0;
                    for (int64_t i = 0; i < tokens; i++) total += c_dc[i];
                    part.scalars->shared_loss += A(total);
                });
                break;
            case GRAD_FLOWS:  // the weights of d(Σq/I) are dÔ, those of dΣq are dO
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    A *k = h.k + t * D, *grad = h.grad_conserved_outgoing + t;
                    h.grad_competition(t, tokens, grad, h.shared_loss, grad);
                    if (h.needs_flow()) {
                        h.conserved_O(tokens, D, k, number);
                        part.scalars->grad_tau += h.grad_flow(tokens, number, grad);
                    }
                    dots(tokens, D, k, h.grad_sums[CONSERVED_KEY_SUM], number);
                    A *grad_out = h.grad_outgoing + t, total = 0, total_out = 0;
                    for (int64_t i = 0; i < tokens; i++) {
                        const A inverse = h.inverse_outgoing[t + i];
                        total += grad[i];
                        total_out += grad_out[i] = -number[i] * inverse * inverse;
                    }
                    add_weighted(tokens, D, grad, k, part.sums[CONSERVED_QUERY_SUM]);
                    add_weighted(tokens, D, grad_out, k, part.sums[QUERY_SUM]);
                    weights[CONSERVED_QUERY_SUM] += total;
                    weights[QUERY_SUM] += total_out;
                });
                break;
            case GRAD_QUERY:  // the weights of dΣk are dI
                blocks(segment, h.sinks.size, [&](int64_t t, int64_t tokens) {
                    A *q = h.q + t * D, *inverse = h.inverse_incoming + t, total = 0;
                    dots(tokens, D, q, h.grad_sums[CONSERVED_QUERY_SUM], number);
                    for (int64_t i = 0; i < tokens; i++)
                        total += number[i] = -(h.alpha_dalpha[t + i] + number[i] * inverse[i]) * inverse[i];
                    add_weighted(tokens, D, number, q, part.sums[KEY_SUM]);
                    weights[KEY_SUM] += total;
                    const A* columns[] = {h.grad_conserved_incoming + t, inverse, number};
                    const A* vectors[] = {h.raised[CONSERVED_KEY_SUM], h.grad_sums[CONSERVED_QUERY_SUM],
                                          h.raised[KEY_SUM], h.grad_sums[QUERY_SUM]};
                    gradient(tokens, h.grad_q + t * D, q, columns, vectors, [&](int64_t i, auto f) {
                        write_row(call.grad_query.at<T>(h.row, h.head, h.sinks.start + t + i), call.dim, f);
                    });
                });
                break;
            case GRAD_KEY:
                blocks(segment, h.sources.size, [&](int64_t t, int64_t tokens) {
                    const A* columns[] = {h.grad_conserved_outgoing + t, h.inverse_outgoing + t, h.grad_outgoing + t};
                    const A* vectors[] = {h.raised[CONSERVED_QUERY_SUM], h.grad_sums[CONSERVED_KEY_SUM],
                                          h.raised[QUERY_SUM], h.grad_sums[KEY_SUM]};
                    gradient(tokens, h.grad_k + t * D, h.k + t * D, columns, vectors, [&](int64_t i, auto f) {
                        h.write_source(call.grad_key, call.dim, h.sources.start + t + i, f);
                    });
                });
        }
    }

    void finish_backward(int level, Head& h) const {
        auto keep = [&](FeatureSum which) {  // Σ weight (x + ε) = Σ weight x + ε Σ weight
            const A *sum = h.total.sums[which], eps = A(call.eps), weight = h.total.scalars->weights[which];
            for (int64_t c = 0; c < D; c++) h.grad_sums[which][c] = sum[c] + eps * weight;
        };
        switch (level) {
            case GRAD_MEMORY:
                keep(CONSERVED_KEY_SUM);
                h.I = flow(h, KEY_SUM);
                h.O = flow(h, QUERY_SUM);
                h.conserved_I = flow(h, CONSERVED_KEY_SUM);
                transpose(D, E, h.total.matrix, E, h.grad_memory_T, D);
                if (call.renormalize) keep(COMPETING_SUM);
                h.grad_power = h.total.scalars->grad_gamma;
                break;
            case GRAD_COMPETITION: h.shared_loss = h.total.scalars->shared_loss; break;
            case GRAD_FLOWS:
                keep(CONSERVED_QUERY_SUM);
                keep(QUERY_SUM);
                call.write_grad_powers(h.index, h.total.scalars->grad_tau, h.grad_power);
                break;
            case GRAD_QUERY: keep(KEY_SUM);
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
        Arena<A> slot_arena, block_arena;
        lay_out(longest, slot_arena, backward);
        Block(E, block_arena);
        const int64_t slot_size = slot_arena.size(), block_size = block_arena.size();
        const int64_t part_size = padded(record_size(true), LINE<A>);
        auto size = [&](int level) { return record_size(level == (backward ? int(GRAD_MEMORY) : int(MEMORY))); };
        auto compute = [&](int level, Head& h, int64_t segment, const Record& part, A* scratch) {
            std::fill_n(part.begin(), size(level), A(0));
            Arena<A> arena(scratch);
            const Block block(E, arena);
            backward ? this->backward(level, h, segment, part, block) : forward(level, h, segment, part, block);
        };
        auto fold = [&](int level, Head& h, const Record& part) {
            A *total = h.total.begin(), *other = part.begin(), &maximum = h.total.scalars->maximum;
            if (!backward && level == CONSERVED) maximum = std::max(maximum, part.scalars->maximum);
            else
                for (int64_t i = 0; i < size(level); i++) total[i] += other[i];
        };
        auto finish = [&](int level, Head& h) { backward ? finish_backward(level, h) : finish_forward(level, h); };

        advise_results<T>(call, backward);
        if (heads >= threads || segments <= 1) {
            const int64_t worker_size = std::max(slot_size + block_size + part_size, short_heads.space_size());
            Buffer<A> memory(threads * worker_size);
            Pool::run(heads, threads, [&](int64_t index, int worker) {
                A *slot = memory + worker * worker_size, *block = slot + slot_size;
                const Record part(block + block_size, D);
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
                const Record part = segment ? Record(parts + index * part_size, D) : h.total;
                compute(level, h, segment, part, scratch + worker * block_size);
            });
            for (size_t i = 0; i < all.size(); i++) {
                for (int64_t segment = 1; segment < segments; segment++)
                    fold(level, all[i], Record(parts + (i * segments + segment) * part_size, D));
                finish(level, all[i]);
            }
        }
    }
};
