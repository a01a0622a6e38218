// Causal Flow-Attention: a head is processed in chunks of tokens, with its state between them, forward and backward.
//
// Flows come from running sums over tokens. The result of a chunk comes from matrix products: q S for all earlier
// chunks, and the lower triangle of P = q kᵀ inside the chunk. The forward pass keeps the state before each segment.
// The backward pass goes over the segments from last to first: it recomputes a segment forward, storing the state
// before each chunk, and then goes over the chunks from last to first.
#pragma once

#include <algorithm>

#include "call.h"

template <class T> struct Causal {
    using A = Sum<T>;
    static constexpr int64_t CHUNK = CAUSAL_CHUNK, SEGMENT = 384;

    const Call& call;
    const Features<T> features;
    const int64_t D, E;  // padded to whole vectors
    const A eps, rest;   // `rest`: ε', minus the products ε² of padded features, which `dot_totals` includes

    explicit Causal(const Call& call)
        : call(call), features(call), D(padded(call.dim, LANES<A>)), E(padded(call.value_dim, LANES<A>)),
          eps(A(call.eps)), rest(A(call.flow_eps - double(D - call.dim) * call.eps * call.eps)),
          SUMS(call.feature_sums()), norm(call.renormalize ? INVERSE_NORM : INVERSE_INCOMING),
          gate(call.powers ? GATE : ALLOCATION) {}

    // Numbers per token of a chunk. POSITION counts from 1. SHARE is exp(τ Ô) divided by its running sum, DECAY is the
    // share of all earlier tokens. INVERSE_NORM is set if renormalised: the inverse of ⟨q, Σ c k⟩. GATE (α before its
    // power) and FLOW (Ô after the clamp) are set with powers.
    enum {
        POSITION, INVERSE_INCOMING, INVERSE_OUTGOING, ALLOCATION, COMPETITION, SHARE, DECAY, CLAMPED,
        INVERSE_NORM, GATE, FLOW, NUMBERS
    };
    struct Numbers {
        A* data;
        A* operator[](int which) const { return data + which * CHUNK; }
    };
    const int64_t SUMS;  // number of sums of features, see `Call::feature_sums`
    const int norm;      // INVERSE_INCOMING or, if renormalised, INVERSE_NORM: the factor of the results
    const int gate;      // ALLOCATION or, with powers, GATE: the sigmoid of Î

    struct Head {
        int64_t index, sequence, row, head, key_head;  // `row`: index in the first axis of tensors, 0 if packed
        Span tokens;
        const bool* mask;
        // the state: sums of features; S; number of tokens; and Σ exp(τ Ô), stored as exp(reference) · total
        FeatureSums<A> sums;
        A *memory, count, reference;
        A tau, gamma;   // powers of competition and allocation
        Wide<A> total;  // wide, since rounding errors of a running sum of nearly equal numbers do not cancel
    };

    // the scalars of a state that the caller passes or receives, as in `FlowState`
    struct StateScalars {
        A count, log_outgoing, log_incoming;
    };

    // the state before a segment, in `kept`
    struct Record {
        struct Scalars {  // their number is `KEPT_SCALARS` in `op.py`
            A count, reference, total, total_rest;  // total_rest: what `total` loses when rounded to type A
        };
        A *sums, *memory;
        Scalars* scalars;
    };

    int64_t segments(const Head& h) const { return (h.tokens.size + SEGMENT - 1) / SEGMENT; }

    // the record of a segment; the first segment has none
    Record record(const Head& h, int64_t segment) const {
        const int64_t before =
            call.sink_bounds ? h.tokens.start / SEGMENT + h.sequence : h.sequence * ((call.sinks - 1) / SEGMENT);
        const int64_t size = call.record_size<A>() + sizeof(typename Record::Scalars) / sizeof(A);
        A *sums = (A*)call.kept + ((before + segment - 1) * call.heads + h.head) * size, *memory = sums + SUMS * D;
        return {sums, memory, (typename Record::Scalars*)(memory + D * E)};
    }

    Head begin(int64_t index, A* sums, A* memory) const {
        Head h{};
        h.index = index;
        h.sequence = index / call.heads;
        h.row = call.sink_bounds ? 0 : h.sequence;
        h.head = index % call.heads;
        h.key_head = h.head / call.shared;
        h.tokens = span(call.sink_bounds, h.sequence, call.sinks);
        h.mask = call.query_mask ? call.query_mask + h.sequence * call.sinks : nullptr;
        h.sums = {sums, D};
        h.memory = memory;
        h.tau = call.tau<A>(h.head);
        h.gamma = call.gamma<A>(h.head);
        return h;
    }

    void read_state(Head& h, const void* sums, const void* memory, const void* scalars) const {
        std::fill_n(h.sums.data, SUMS * D, A(0));
        if (memory || !sums) std::fill_n(h.memory, D * E, A(0));
        h.count = 0;
        h.reference = -std::numeric_limits<A>::infinity();
        if (sums) {
            const A *from = (const A*)sums + h.index * SUMS * call.dim, *rows = (const A*)memory;
            for (int64_t i = 0; i < SUMS; i++) std::copy_n(from + i * call.dim, call.dim, h.sums[i]);
            for (int64_t d = 0; memory && d < call.dim; d++)
                std::copy_n(rows + (h.index * call.dim + d) * call.value_dim, call.value_dim, h.memory + d * E);
            h.count = ((const StateScalars*)scalars)[h.index].count;
            if (h.count > 0) h.reference = ((const StateScalars*)scalars)[h.index].log_outgoing;
        }
        h.total = std::isinf(h.reference) ? 0 : 1;
    }

    void write_state(const Head& h, void* sums, void* memory) const {
        for (int64_t i = 0; i < SUMS; i++)
            std::copy_n(h.sums[i], call.dim, (A*)sums + (h.index * SUMS + i) * call.dim);
        for (int64_t d = 0; memory && d < call.dim; d++)
            std::copy_n(h.memory + d * E, call.value_dim, (A*)memory + (h.index * call.dim + d) * call.value_dim);
    }

    // log Σ exp(τ Ô)
    A logarithm(const Head& h) const {
        return h.total > 0 ? A(h.reference + std::log(h.total)) : -std::numeric_limits<A>::infinity();
    }

    void keep(const Head& h, const Record& kept) const {
        std::copy_n(h.sums.data, SUMS * D, kept.sums);
        std::copy_n(h.memory, D * E, kept.memory);
        *kept.scalars = {h.count, h.reference, A(h.total), A(h.total - A(h.total))};
    }

    void recall(Head& h, const Record& kept) const {
        std::copy_n(kept.sums, SUMS * D, h.sums.data);
        std::copy_n(kept.memory, D * E, h.memory);
        h.count = kept.scalars->count;
        h.reference = kept.scalars->reference;
        h.total = Wide<A>(kept.scalars->total) + kept.scalars->total_rest;
    }

    // totals[i] = sum + Σ_{j ≤ i} f(j, column) + ε; then `sum` is advanced past the last token
    template <class F> void running_sums(int64_t tokens, F f, A* sum, A* totals) const {
        for (int64_t c = 0; c < D; c += LANES<A>) {
            const Vector<A> before = load(sum + c);
            Vector<A> inside = {};
            for (int64_t i = 0; i < tokens; i++) {
                inside += f(i, c);
                store(totals + i * D + c, (before + inside) + eps);
            }
            store(sum + c, before + inside);
        }
    }

    // the flow of each token: (x + ε) · total + ε', for totals that include ε
    void dot_totals(int64_t tokens, const A* x, const A* totals, A* result) const {
        sum_each(tokens, result, [=](int64_t t) {
            Vector<A> total = {};
            for (int64_t c = t * D; c < (t + 1) * D; c += LANES<A>) total += (load(x + c) + eps) * load(totals + c);
            return total;
        });
        for (int64_t t = 0; t < tokens; t++) result[t] += rest;
    }

    // Compute the numbers of a chunk from its features, and advance the sums of the state past it. `totals`: scratch
    // (CHUNK, D)
    void flows(Head& h, int64_t t, int64_t tokens, const A* q, const A* k, A* totals, Numbers number) const {
        A *position = number[POSITION], *in = number[INVERSE_INCOMING], *out = number[INVERSE_OUTGOING];
        A *allocation = number[ALLOCATION], *competition = number[COMPETITION];
        const bool* mask = h.mask ? h.mask + t : nullptr;
        for (int64_t i = 0; i < tokens; i++) {
            h.count += !mask || mask[i];
            position[i] = std::max(h.count, A(1));
        }
        running_sums(tokens, [=](int64_t i, int64_t c) { return load(k + i * D + c); }, h.sums[KEY_SUM], totals);
        dot_totals(tokens, q, totals, in);
        running_sums(tokens, [=](int64_t i, int64_t c) { return load(q + i * D + c); }, h.sums[QUERY_SUM], totals);
        dot_totals(tokens, k, totals, out);
        for (int64_t i = 0; i < tokens; i++) {
            in[i] = position[i] / in[i];
            out[i] = position[i] / out[i];
        }
        running_sums(tokens, [=](int64_t i, int64_t c) { return out[i] * load(k + i * D + c); },
                     h.sums[CONSERVED_KEY_SUM], totals);
        dot_totals(tokens, q, totals, allocation);
        running_sums(tokens, [=](int64_t i, int64_t c) { return in[i] * load(q + i * D + c); },
                     h.sums[CONSERVED_QUERY_SUM], totals);
        dot_totals(tokens, k, totals, competition);
        for (int64_t i = 0; i < tokens; i++) {
            allocation[i] /= position[i];
            competition[i] /= position[i];
        }

        if (call.allocation == NO_ALLOCATION) std::fill_n(allocation, tokens, A(1));
        else map_tokens(tokens, allocation, [](Vector<A> x) { return sigmoid<A>(x); });
        const A clamp = A(call.clamp);
        for (int64_t i = 0; i < tokens; i++) {
            number[CLAMPED][i] = std::abs(competition[i]) > clamp;
            competition[i] = competition[i] < -clamp ? -clamp : competition[i] > clamp ? clamp : competition[i];
        }
        if (call.powers)
            for (int64_t i = 0; i < tokens; i++) {
                number[GATE][i] = allocation[i];
                allocation[i] = std::pow(allocation[i], h.gamma);
                number[FLOW][i] = competition[i];
                competition[i] *= h.tau;
            }
        if (call.competition == SIGMOID_COMPETITION)
            map_tokens(tokens, competition, [](Vector<A> x) { return sigmoid<A>(x); });
        if (call.competition == NO_COMPETITION) std::fill_n(competition, tokens, A(1));
        if (call.competition == SOFTMAX_COMPETITION)
            for (int64_t i = 0; i < tokens; i++) {
                if (mask && !mask[i]) {
                    number[SHARE][i] = 0;
                    number[DECAY][i] = 1;
                    continue;
                }
                A share = 1;
                Wide<A> before = h.total;
                if (competition[i] > h.reference) {
                    before *= std::exp(h.reference - competition[i]);
                    h.reference = competition[i];
                } else {
                    share = std::exp(competition[i] - h.reference);
                }
                h.total = before + share;
                number[SHARE][i] = A(share / h.total);
                number[DECAY][i] = A(before / h.total);
                competition[i] = position[i] * number[SHARE][i];
            }
        if (mask)
            for (int64_t i = 0; i < tokens; i++)
                if (!mask[i]) allocation[i] = competition[i] = 0;
        if (call.renormalize) {
            competing_sums(tokens, k, competition, h.sums[COMPETING_SUM], totals);
            dot_totals(tokens, q, totals, number[INVERSE_NORM]);
            for (int64_t i = 0; i < tokens; i++) number[INVERSE_NORM][i] = position[i] / number[INVERSE_NORM][i];
        }
    }

    // totals: Σ c k up to each token, plus ε; advances `sum`, the Σ c k of the state, past the last token
    void competing_sums(int64_t tokens, const A* k, const A* competition, A* sum, A* totals) const {
        running_sums(tokens, [=](int64_t i, int64_t c) { return competition[i] * load(k + i * D + c); }, sum, totals);
    }

    // α/(I D) of each token, the factor of the result, where D is the position; if renormalised, with the norm for I
    void received(int64_t tokens, Numbers number, A* result) const {
        for (int64_t i = 0; i < tokens; i++)
            result[i] = number[ALLOCATION][i] * number[norm][i] / number[POSITION][i];
    }

    // the lower triangle of x yᵀ, 0 above it; `y_T`: scratch for yᵀ
    static void lower_product(int64_t tokens, int64_t width, int64_t length, const A* x, A* y, A* y_T, A* result) {
        const int64_t columns = padded(tokens, LANES<A>);
        std::fill_n(y + tokens * width, (columns - tokens) * width, A(0));
        transpose(columns, width, y, width, y_T, CHUNK);
        product<A, false, false>(tokens, columns, length, x, width, y_T, CHUNK, result, CHUNK);
        for (int64_t i = 0; i < tokens; i++) std::fill(result + i * CHUNK + i + 1, result + (i + 1) * CHUNK, A(0));
    }

    // c += a b for lower triangular a
    static void add_lower(int64_t tokens, int64_t columns, const A* a, const A* b, A* c) {
        for (int64_t i = 0; i < tokens; i += TILE_ROWS) {
            const int64_t rows = std::min<int64_t>(TILE_ROWS, tokens - i);
            product<A, false, true>(rows, columns, i + rows, a + i * CHUNK, CHUNK, b, columns, c + i * columns,
                                    columns);
        }
    }

    // c += aᵀ b for lower triangular a
    static void add_upper(int64_t tokens, int64_t columns, const A* a, const A* b, A* c) {
        for (int64_t i = 0; i < tokens; i += TILE_ROWS)
            product<A, true, true>(std::min<int64_t>(TILE_ROWS, tokens - i), columns, tokens - i, a + i * CHUNK + i,
                                   CHUNK, b + i * columns, columns, c + i * columns, columns);
    }

    // call f(first token, number of tokens) for each chunk of a segment
    template <class F> void chunks(const Head& h, int64_t segment, F f) const {
        const int64_t stop = std::min(h.tokens.size, (segment + 1) * SEGMENT);
        for (int64_t t = segment * SEGMENT; t < stop; t += CHUNK) f(t, std::min(CHUNK, stop - t));
    }

    void load_features(const Head& h, int64_t t, int64_t tokens, A* q, A* k) const {
        const bool* mask = h.mask ? h.mask + t : nullptr;
        features(call.query, h.row, h.head, h.tokens.start + t, tokens, mask, q);
        features(call.key, h.row, h.key_head, h.tokens.start + t, tokens, mask, k);
    }

    void load_values(const Rows& rows, int64_t head, const Head& h, int64_t t, int64_t tokens, const A* factor,
                     A* result) const {
        scaled_rows<T>(rows, call.value_dim, h.row, head, h.tokens.start + t, tokens, h.mask ? h.mask + t : nullptr,
                       factor, result);
    }

    // One token: S is read once, from the state before the token, and written once, to the state after it
    void decode(Head& h, A* q, A* k, A* totals, Numbers number, A* value, A* row) const {
        load_features(h, 0, 1, q, k);
        flows(h, 0, 1, q, k, totals, number);
        load_values(call.value, h.key_head, h, 0, 1, number[COMPETITION], value);
        std::fill_n(row, E, A(0));
        const A* before = (const A*)call.memory + h.index * call.dim * call.value_dim;
        A *after = (A*)call.end_memory + h.index * call.dim * call.value_dim, factor;
        for (int64_t d = 0; d < call.dim; d++)
            for_row(before + d * call.value_dim, call.value_dim, [&](int64_t c, Vector<A> x) {
                x += k[d] * load(value + c);
                store(row + c, load(row + c) + q[d] * x);
                if (c + LANES<A> <= call.value_dim) store(after + d * call.value_dim + c, x);
                else write_some(after + d * call.value_dim + c, x, call.value_dim - c);
            });
        received(1, number, &factor);
        write_row(call.result.at<T>(h.row, h.head, h.tokens.start), call.value_dim,
                  [&](int64_t c) { return load(row + c) * factor; });
    }

    // scratch memory of the forward pass of a head
    struct ForwardSpace {
        A *sums, *memory, *q, *k, *k_T, *values, *products, *rows, *totals;
        Numbers number;
        A* factor;

        ForwardSpace(const Causal& causal, Arena<A>& arena) {
            const int64_t D = causal.D, E = causal.E;
            sums = arena.take(causal.SUMS * D);
            memory = arena.take(D * E);
            q = arena.take(CHUNK * D);
            k = arena.take(CHUNK * D);
            k_T = arena.take(D * CHUNK);
            values = arena.take(CHUNK * E);
            products = arena.take(CHUNK * CHUNK);
            rows = arena.take(CHUNK * E);
            totals = arena.take(CHUNK * D);
            number = {arena.take(NUMBERS * CHUNK)};
            factor = arena.take(CHUNK);
        }
    };

    void forward_head(int64_t index, A* space) const {
        Arena<A> arena(space);
        const ForwardSpace s(*this, arena);
        Head h = begin(index, s.sums, s.memory);
        A *q = s.q, *k = s.k, *values = s.values, *rows = s.rows, *factor = s.factor;
        const bool is_decoding = call.sums && h.tokens.size == 1;
        read_state(h, call.sums, is_decoding ? nullptr : call.memory, call.scalars);
        if (is_decoding) decode(h, q, k, s.totals, s.number, values, rows);
        for (int64_t segment = 0; !is_decoding && segment < segments(h); segment++) {
            if (segment) keep(h, record(h, segment));
            chunks(h, segment, [&](int64_t t, int64_t tokens) {
                load_features(h, t, tokens, q, k);
                flows(h, t, tokens, q, k, s.totals, s.number);
                load_values(call.value, h.key_head, h, t, tokens, s.number[COMPETITION], values);
                product<A, false, false>(tokens, E, call.dim, q, D, h.memory, E, rows, E);
                lower_product(tokens, D, call.dim, q, k, s.k_T, s.products);
                add_lower(tokens, E, s.products, values, rows);
                product<A, true, true>(call.dim, E, tokens, k, D, values, E, h.memory, E);
                received(tokens, s.number, factor);
                for (int64_t i = 0; i < tokens; i++)
                    write_row(call.result.at<T>(h.row, h.head, h.tokens.start + t + i), call.value_dim,
                              [&](int64_t c) { return load(rows + i * E + c) * factor[i]; });
            });
        }
        if (!call.end_sums) return;
        write_state(h, call.end_sums, is_decoding ? nullptr : call.end_memory);
        const StateScalars nothing{0, -std::numeric_limits<A>::infinity(), -std::numeric_limits<A>::infinity()};
        const StateScalars& before = call.scalars ? ((const StateScalars*)call.scalars)[index] : nothing;
        const A log_outgoing = call.competition == SOFTMAX_COMPETITION ? logarithm(h) : before.log_outgoing;
        ((StateScalars*)call.end_scalars)[index] = {h.count, log_outgoing, before.log_incoming};
    }

    // a chunk as recomputed in the backward pass: its features, its numbers, and the state before it
    struct Chunk {
        A *q, *k;
        Numbers number;
        FeatureSums<A> sums;
        A* memory_T;
    };

    // the gradients of the state after the current chunk (`log`: of log Σ exp(τ Ô)), and of the powers so far
    struct Gradient {
        FeatureSums<A> sums;
        A *memory, *memory_T, log;
        Wide<A> tau, gamma;
    };

    // scratch memory of `backward_chunk`
    struct ChunkSpace {
        A *received, *alpha_dalpha, *c_dc, *conserved_in, *conserved_out;
        A *grads, *values, *grad_values, *transposed, *products, *grad_products, *grad_q, *grad_k;
        A* totals[COMPETING_SUM];  // for each FeatureSum before it, the sum up to each token, plus ε

        ChunkSpace(const Causal& causal, Arena<A>& arena) {
            const int64_t D = causal.D, E = causal.E;
            for (A** numbers : {&received, &alpha_dalpha, &c_dc, &conserved_in, &conserved_out})
                *numbers = arena.take(CHUNK);
            for (A** rows : {&grads, &values, &grad_values}) *rows = arena.take(CHUNK * E);
            transposed = arena.take(CHUNK * std::max(D, E));
            for (A** square : {&products, &grad_products}) *square = arena.take(CHUNK * CHUNK);
            for (A** rows : {&grad_q, &grad_k}) *rows = arena.take(CHUNK * D);
            for (A*& rows : totals) rows = arena.take(CHUNK * D);
        }
    };

    // scratch memory of the backward pass of a head
    struct BackwardSpace {
        ChunkSpace chunk;
        Chunk recomputed[SEGMENT / CHUNK];
        A *sums, *memory, *totals, *values, *memory_T, *grad_sums, *grad_memory, *grad_memory_T;

        BackwardSpace(const Causal& causal, Arena<A>& arena) : chunk(causal, arena) {
            const int64_t D = causal.D, E = causal.E, SUMS = causal.SUMS;
            for (Chunk& each : recomputed) {
                each.q = arena.take(CHUNK * D);
                each.k = arena.take(CHUNK * D);
                each.number = {arena.take(NUMBERS * CHUNK)};
                each.sums = {arena.take(SUMS * D), D};
                each.memory_T = arena.take(E * D);
            }
            sums = arena.take(SUMS * D);
            memory = arena.take(D * E);
            totals = arena.take(CHUNK * D);
            values = arena.take(CHUNK * E);
            memory_T = arena.take(E * D);
            grad_sums = arena.take(SUMS * D);
            grad_memory = arena.take(D * E);
            grad_memory_T = arena.take(E * D);
        }
    };

    void backward_head(int64_t index, A* space) const {
        Arena<A> arena(space);
        const BackwardSpace s(*this, arena);
        Head h = begin(index, s.sums, s.memory);
        A* memory_T = s.memory_T;

        // the gradient of a state has the layout of a state: use the same functions to read and write it
        Head end = begin(index, s.grad_sums, s.grad_memory);
        read_state(end, call.grad_end_sums, call.grad_end_memory, call.grad_end_scalars);
        const auto* grad_end = (const StateScalars*)call.grad_end_scalars;
        Gradient grad{end.sums, end.memory, s.grad_memory_T};
        if (grad_end) grad.log = grad_end[index].log_outgoing;
        transpose(D, E, grad.memory, E, grad.memory_T, D);
        for (int64_t segment = segments(h) - 1; segment >= 0; segment--) {
            if (segment) recall(h, record(h, segment));
            else read_state(h, call.sums, call.memory, call.scalars);
            transpose(D, E, h.memory, E, memory_T, D);
            chunks(h, segment, [&](int64_t t, int64_t tokens) {
                const Chunk& chunk = s.recomputed[t % SEGMENT / CHUNK];
                std::copy_n(h.sums.data, SUMS * D, chunk.sums.data);
                std::copy_n(memory_T, E * D, chunk.memory_T);
                load_features(h, t, tokens, chunk.q, chunk.k);
                flows(h, t, tokens, chunk.q, chunk.k, s.totals, chunk.number);
                if (std::min(h.tokens.size, (segment + 1) * SEGMENT) == t + tokens) return;
                load_values(call.value, h.key_head, h, t, tokens, chunk.number[COMPETITION], s.values);
                product<A, true, true>(call.value_dim, D, tokens, s.values, E, chunk.k, D, memory_T, D);
            });
            const int64_t last = (std::min(h.tokens.size, (segment + 1) * SEGMENT) - 1) / CHUNK * CHUNK;
            for (int64_t t = last; t >= segment * SEGMENT; t -= CHUNK)
                backward_chunk(h, t, std::min(CHUNK, h.tokens.size - t), s.recomputed[t % SEGMENT / CHUNK], grad,
                               s.chunk);
        }
        call.write_grad_powers(index, A(grad.tau), A(grad.gamma));
        if (!call.grad_sums) return;
        write_state(end, call.grad_sums, call.grad_memory);
        const bool begun = call.scalars && ((const StateScalars*)call.scalars)[index].count > 0;
        const A grad_log = call.competition == SOFTMAX_COMPETITION && !begun ? A(0) : grad.log;
        ((StateScalars*)call.grad_scalars)[index] = {0, grad_log, grad_end[index].log_incoming};
    }

    void backward_chunk(const Head& h, int64_t t, int64_t tokens, const Chunk& chunk, Gradient& grad,
                        const ChunkSpace& s) const {
        A *q = chunk.q, *k = chunk.k, *received = s.received, *alpha_dalpha = s.alpha_dalpha, *c_dc = s.c_dc;
        A *conserved_in = s.conserved_in, *conserved_out = s.conserved_out;
        A *grads = s.grads, *values = s.values, *grad_values = s.grad_values;
        A *products = s.products, *grad_products = s.grad_products, *grad_q = s.grad_q, *grad_k = s.grad_k;
        const Numbers number = chunk.number;
        const A *position = number[POSITION], *in = number[INVERSE_INCOMING], *out = number[INVERSE_OUTGOING];
        const A* competition = number[COMPETITION];

        // R = α/(I D) (q S + P c V), where S sums the earlier chunks, and P is the lower triangle of q kᵀ
        this->received(tokens, number, received);
        load_values(call.grad, h.head, h, t, tokens, received, grads);
        load_values(call.value, h.key_head, h, t, tokens, competition, values);
        lower_product(tokens, D, call.dim, q, k, s.transposed, products);
        lower_product(tokens, E, call.value_dim, grads, values, s.transposed, grad_products);
        product<A, false, false>(tokens, D, call.value_dim, grads, E, chunk.memory_T, D, grad_q, D);
        row_dots(tokens, D, q, grad_q, alpha_dalpha);
        product<A, false, false>(tokens, E, call.dim, k, D, grad.memory, E, grad_values, E);
        row_dots(tokens, E, grad_values, values, c_dc);
        for (int64_t i = 0; i < tokens; i++)
            for (int64_t j = 0; j <= i; j++) {
                const A shared = products[i * CHUNK + j] * grad_products[i * CHUNK + j];
                alpha_dalpha[i] += shared;  // ⟨dR, R⟩
                c_dc[j] += shared;
            }
        add_upper(tokens, E, products, grads, grad_values);
        for (int64_t i = 0; i < tokens; i++)
            write_source(call.grad_value, call.value_dim, h, h.tokens.start + t + i,
                         [&](int64_t c) { return load(grad_values + i * E + c) * competition[i]; });
        product<A, false, false>(tokens, D, call.value_dim, values, E, grad.memory_T, D, grad_k, D);
        add_upper(tokens, D, grad_products, q, grad_k);
        add_lower(tokens, D, grad_products, k, grad_q);
        product<A, true, true>(call.dim, E, tokens, q, D, grads, E, grad.memory, E);
        transpose(D, E, grad.memory, E, grad.memory_T, D);
        if (call.renormalize) backward_norm(tokens, chunk, grad, s);

        for (int64_t i = tokens - 1; i >= 0; i--) {
            const A grad_gate = alpha_dalpha[i] * (1 - number[gate][i]) * h.gamma;
            conserved_in[i] = call.allocation == NO_ALLOCATION ? A(0) : grad_gate / position[i];
            A flow = 0;
            if (call.competition == SIGMOID_COMPETITION) flow = c_dc[i] * (1 - competition[i]);
            if (call.competition == SOFTMAX_COMPETITION) {
                // exp(L) Σ dL' exp(−L') over this token and later ones, where L is the running log Σ exp(τ Ô)
                grad.log -= c_dc[i];
                flow = c_dc[i] + number[SHARE][i] * grad.log;
                grad.log *= number[DECAY][i];
            }
            conserved_out[i] = number[CLAMPED][i] ? A(0) : flow * h.tau / position[i];
            if (call.powers) {
                grad.tau += flow * number[FLOW][i];
                grad.gamma += alpha_dalpha[i] * std::log(number[GATE][i]);
            }
        }
        if (call.renormalize) std::fill_n(alpha_dalpha, tokens, A(0));  // the result does not depend on I directly

        auto add_up = [&](FeatureSum which, const A* x, const A* factor) {
            auto row = [=](int64_t i, int64_t c) { return (factor ? factor[i] : A(1)) * load(x + i * D + c); };
            running_sums(tokens, row, chunk.sums[which], s.totals[which]);
        };
        add_up(KEY_SUM, k, nullptr);
        add_up(QUERY_SUM, q, nullptr);
        add_up(CONSERVED_KEY_SUM, k, out);
        add_up(CONSERVED_QUERY_SUM, q, in);
        A *grad_key_sum = grad.sums[KEY_SUM], *grad_conserved_key_sum = grad.sums[CONSERVED_KEY_SUM];
        A *grad_query_sum = grad.sums[QUERY_SUM], *grad_conserved_query_sum = grad.sums[CONSERVED_QUERY_SUM];
        features.with_derivative([&](auto derivative) {
            for (int64_t i = tokens - 1; i >= 0; i--) {
                const A *x = q + i * D, *y = k + i * D;
                const A *key_total = s.totals[KEY_SUM] + i * D, *query_total = s.totals[QUERY_SUM] + i * D;
                const A* conserved_key_total = s.totals[CONSERVED_KEY_SUM] + i * D;
                const A* conserved_query_total = s.totals[CONSERVED_QUERY_SUM] + i * D;
                add_raised(grad_conserved_key_sum, conserved_in[i], x);
                add_raised(grad_conserved_query_sum, conserved_out[i], y);
                const A through_in = dot(D, x, grad_conserved_query_sum);
                const A through_out = dot(D, y, grad_conserved_key_sum);
                const A flow_in = -(alpha_dalpha[i] + through_in * in[i]) * in[i] / position[i];
                const A flow_out = -through_out * out[i] * out[i] / position[i];
                add_raised(grad_key_sum, flow_in, x);
                add_raised(grad_query_sum, flow_out, y);
                write_row(call.grad_query.at<T>(h.row, h.head, h.tokens.start + t + i), call.dim, [&](int64_t c) {
                    Vector<A> sum = load(grad_q + i * D + c) + load(grad_query_sum + c);
                    sum += flow_in * load(key_total + c) + conserved_in[i] * load(conserved_key_total + c);
                    return (sum + in[i] * load(grad_conserved_query_sum + c)) * derivative(load(x + c));
                });
                write_source(call.grad_key, call.dim, h, h.tokens.start + t + i, [&](int64_t c) {
                    Vector<A> sum = load(grad_k + i * D + c) + load(grad_key_sum + c);
                    sum += flow_out * load(query_total + c) + conserved_out[i] * load(conserved_query_total + c);
                    return (sum + out[i] * load(grad_conserved_key_sum + c)) * derivative(load(y + c));
                });
            }
        });
    }

    // if renormalised: add the gradients through the norm ⟨q, Σ c k⟩ to c dc and to the gradients of the features
    void backward_norm(int64_t tokens, const Chunk& chunk, const Gradient& grad, const ChunkSpace& s) const {
        const A *competition = chunk.number[COMPETITION], *position = chunk.number[POSITION];
        A *totals = s.totals[KEY_SUM], *grad_competing_sum = grad.sums[COMPETING_SUM];  // `totals`: free until later
        competing_sums(tokens, chunk.k, competition, chunk.sums[COMPETING_SUM], totals);
        for (int64_t i = tokens - 1; i >= 0; i--) {
            const A grad_norm = -s.alpha_dalpha[i] * chunk.number[norm][i] / position[i];
            add_raised(grad_competing_sum, grad_norm, chunk.q + i * D);
            s.c_dc[i] += competition[i] * dot(D, chunk.k + i * D, grad_competing_sum);
            add_outer(1, D, &grad_norm, totals + i * D, s.grad_q + i * D);
            add_outer(1, D, competition + i, grad_competing_sum, s.grad_k + i * D);
        }
    }

    // total += factor · (x + ε)
    void add_raised(A* total, A factor, const A* x) const {
        for (int64_t c = 0; c < D; c += LANES<A>) store(total + c, load(total + c) + factor * (load(x + c) + eps));
    }

    // write a row of dK or dV; the caller sums the rows of query heads that share a key head, in type A
    template <class F> void write_source(const Rows& rows, int64_t size, const Head& h, int64_t token, F f) const {
        if (call.shared > 1) write_row(rows.at<A>(h.row, h.head, token), size, f);
        else write_row(rows.at<T>(h.row, h.head, token), size, f);
    }

    void run(bool backward) const {
        const int64_t heads = call.sequences * call.heads;
        Arena<A> arena;
        if (backward) BackwardSpace(*this, arena);
        else ForwardSpace(*this, arena);
        const int64_t space = arena.size();
        const int threads = workers(call);
        advise_results<T>(call, backward);
        Buffer<A> memory(threads * space);
        Pool::run(heads, threads, [&](int64_t index, int worker) {
            backward ? backward_head(index, memory + worker * space) : forward_head(index, memory + worker * space);
        });
    }
};
