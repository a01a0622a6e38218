// Causal Flow-Attention: a head is processed in chunks of tokens, with its state between them, forward and backward.
//
// Flows come from running sums over tokens. The result of a chunk comes from matrix products: q S for all earlier
// chunks, and the lower triangle of P = q kᵀ inside the chunk. The forward pass keeps the state before each segment.
// The backward pass goes over the segments from last to first: it recomputes a segment forward, storing the state
// before each chunk, and then goes over the chunks from last to first.
#pragma once

#include <algorithm>
#include <utility>

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
    const int64_t SUMS;  // number of sums of features, see `Call::feature_sums`
    const int norm;      // INVERSE_INCOMING or, if renormalised, INVERSE_NORM: the factor of the results
    const int gate;      // ALLOCATION or, with powers, GATE: the sigmoid of Î

    struct Head {
        int64_t index, sequence, row, head, key_head;  // `row`: index in the first axis of tensors, 0 if packed
        Span tokens;
        const bool* mask;
        // the state: Σk, Σq, Σk/O, Σq/I, if renormalised Σ c k; S; number of tokens; and Σ exp(τ Ô), stored as
        // exp(reference) · total
        A *sums, *memory, count, reference;
        A tau, gamma;   // powers of competition and allocation
        Wide<A> total;  // wide, since rounding errors of a running sum of nearly equal numbers do not cancel
    };

    int64_t record_size() const {
        return (SUMS + padded(call.value_dim, LINE<A>)) * padded(call.dim, LINE<A>) + 4;
    }

    int64_t segments(const Head& h) const { return (h.tokens.size + SEGMENT - 1) / SEGMENT; }

    // the buffer in `kept` of the state before a segment; the first segment has none
    A* record(const Head& h, int64_t segment) const {
        const int64_t before =
            call.sink_bounds ? h.tokens.start / SEGMENT + h.sequence : h.sequence * ((call.sinks - 1) / SEGMENT);
        return (A*)call.kept + ((before + segment - 1) * call.heads + h.head) * record_size();
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
        h.sums = sums;
        h.memory = memory;
        h.tau = call.tau<A>(h.head);
        h.gamma = call.gamma<A>(h.head);
        return h;
    }

    void read_state(Head& h, const void* sums, const void* memory, const void* scalars) const {
        std::fill_n(h.sums, SUMS * D, A(0));
        if (memory || !sums) std::fill_n(h.memory, D * E, A(0));
        h.count = 0;
        h.reference = -std::numeric_limits<A>::infinity();
        if (sums) {
            const A *from = (const A*)sums + h.index * SUMS * call.dim, *rows = (const A*)memory;
            for (int64_t i = 0; i < SUMS; i++) std::copy_n(from + i * call.dim, call.dim, h.sums + i * D);
            for (int64_t d = 0; memory && d < call.dim; d++)
                std::copy_n(rows + (h.index * call.dim + d) * call.value_dim, call.value_dim, h.memory + d * E);
            h.count = ((const A*)scalars)[h.index * 3];
            if (h.count > 0) h.reference = ((const A*)scalars)[h.index * 3 + 1];
        }
        h.total = std::isinf(h.reference) ? 0 : 1;
    }

    void write_state(const Head& h, void* sums, void* memory) const {
        for (int64_t i = 0; i < SUMS; i++)
            std::copy_n(h.sums + i * D, call.dim, (A*)sums + (h.index * SUMS + i) * call.dim);
        for (int64_t d = 0; memory && d < call.dim; d++)
            std::copy_n(h.memory + d * E, call.value_dim, (A*)memory + (h.index * call.dim + d) * call.value_dim);
    }

    // log Σ exp(τ Ô)
    A logarithm(const Head& h) const {
        return h.total > 0 ? A(h.reference + std::log(h.total)) : -std::numeric_limits<A>::infinity();
    }

    void keep(const Head& h, A* kept) const {
        const A scalars[] = {h.count, h.reference, A(h.total), A(h.total - A(h.total))};
        kept = std::copy_n(h.sums, SUMS * D, kept);
        kept = std::copy_n(h.memory, D * E, kept);
        std::copy_n(scalars, 4, kept);
    }

    void recall(Head& h, const A* kept) const {
        std::copy_n(kept, SUMS * D, h.sums);
        std::copy_n(kept + SUMS * D, D * E, h.memory);
        const A* scalars = kept + SUMS * D + D * E;
        h.count = scalars[0];
        h.reference = scalars[1];
        h.total = Wide<A>(scalars[2]) + scalars[3];
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
    void flows(Head& h, int64_t t, int64_t tokens, const A* q, const A* k, A* totals, A* numbers) const {
        A* number[NUMBERS];
        for (int i = 0; i < NUMBERS; i++) number[i] = numbers + i * CHUNK;
        A *position = number[POSITION], *in = number[INVERSE_INCOMING], *out = number[INVERSE_OUTGOING];
        A *allocation = number[ALLOCATION], *competition = number[COMPETITION];
        const bool* mask = h.mask ? h.mask + t : nullptr;
        for (int64_t i = 0; i < tokens; i++) {
            h.count += !mask || mask[i];
            position[i] = std::max(h.count, A(1));
        }
        running_sums(tokens, [=](int64_t i, int64_t c) { return load(k + i * D + c); }, h.sums, totals);
        dot_totals(tokens, q, totals, in);
        running_sums(tokens, [=](int64_t i, int64_t c) { return load(q + i * D + c); }, h.sums + D, totals);
        dot_totals(tokens, k, totals, out);
        for (int64_t i = 0; i < tokens; i++) {
            in[i] = position[i] / in[i];
            out[i] = position[i] / out[i];
        }
        running_sums(tokens, [=](int64_t i, int64_t c) { return out[i] * load(k + i * D + c); }, h.sums + 2 * D,
                     totals);
        dot_totals(tokens, q, totals, allocation);
        running_sums(tokens, [=](int64_t i, int64_t c) { return in[i] * load(q + i * D + c); }, h.sums + 3 * D,
                     totals);
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
            competing_sums(tokens, k, competition, h.sums, totals);
            dot_totals(tokens, q, totals, number[INVERSE_NORM]);
            for (int64_t i = 0; i < tokens; i++) number[INVERSE_NORM][i] = position[i] / number[INVERSE_NORM][i];
        }
    }

    // totals: Σ c k up to each token, plus ε; advances Σ c k of the state past the last token
    void competing_sums(int64_t tokens, const A* k, const A* competition, A* sums, A* totals) const {
        running_sums(tokens, [=](int64_t i, int64_t c) { return competition[i] * load(k + i * D + c); }, sums + 4 * D,
                     totals);
    }

    // α/(I D) of each token, the factor of the result, where D is the position; if renormalised, with the norm for I
    void received(int64_t tokens, const A* numbers, A* result) const {
        for (int64_t i = 0; i < tokens; i++)
            result[i] = numbers[ALLOCATION * CHUNK + i] * numbers[norm * CHUNK + i] / numbers[POSITION * CHUNK + i];
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
    void decode(Head& h, A* q, A* k, A* totals, A* numbers, A* value, A* row) const {
        load_features(h, 0, 1, q, k);
        flows(h, 0, 1, q, k, totals, numbers);
        load_values(call.value, h.key_head, h, 0, 1, numbers + COMPETITION * CHUNK, value);
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
        received(1, numbers, &factor);
        write_row(call.result.at<T>(h.row, h.head, h.tokens.start), call.value_dim,
                  [&](int64_t c) { return load(row + c) * factor; });
    }

    void forward_head(int64_t index, A* space) const {
        auto take = [&](int64_t size) { return std::exchange(space, space + padded(size, LINE<A>)); };
        A *sums = take(SUMS * D), *memory = take(D * E);
        Head h = begin(index, sums, memory);
        A *q = take(CHUNK * D), *k = take(CHUNK * D), *k_T = take(D * CHUNK), *values = take(CHUNK * E);
        A *products = take(CHUNK * CHUNK), *rows = take(CHUNK * E), *totals = take(CHUNK * D);
        A *numbers = take(NUMBERS * CHUNK), *factor = take(CHUNK);
        const bool is_decoding = call.sums && h.tokens.size == 1;
        read_state(h, call.sums, is_decoding ? nullptr : call.memory, call.scalars);
        if (is_decoding) decode(h, q, k, totals, numbers, values, rows);
        for (int64_t segment = 0; !is_decoding && segment < segments(h); segment++) {
            if (segment) keep(h, record(h, segment));
            chunks(h, segment, [&](int64_t t, int64_t tokens) {
                load_features(h, t, tokens, q, k);
                flows(h, t, tokens, q, k, totals, numbers);
                load_values(call.value, h.key_head, h, t, tokens, numbers + COMPETITION * CHUNK, values);
                product<A, false, false>(tokens, E, call.dim, q, D, memory, E, rows, E);
                lower_product(tokens, D, call.dim, q, k, k_T, products);
                add_lower(tokens, E, products, values, rows);
                product<A, true, true>(call.dim, E, tokens, k, D, values, E, memory, E);
                received(tokens, numbers, factor);
                for (int64_t i = 0; i < tokens; i++)
                    write_row(call.result.at<T>(h.row, h.head, h.tokens.start + t + i), call.value_dim,
                              [&](int64_t c) { return load(rows + i * E + c) * factor[i]; });
            });
        }
        if (!call.end_sums) return;
        write_state(h, call.end_sums, is_decoding ? nullptr : call.end_memory);
        A* scalars = (A*)call.end_scalars + index * 3;
        scalars[0] = h.count;
        scalars[1] = call.competition == SOFTMAX_COMPETITION ? logarithm(h)
                     : call.scalars                         ? ((const A*)call.scalars)[index * 3 + 1]
                                                            : -std::numeric_limits<A>::infinity();
        scalars[2] = call.scalars ? ((const A*)call.scalars)[index * 3 + 2] : -std::numeric_limits<A>::infinity();
    }

    int64_t forward_space() const {
        return SUMS * D + D * E + CHUNK * (4 * D + 2 * E) + CHUNK * CHUNK + (NUMBERS + 1) * CHUNK + 128;
    }

    // a chunk as recomputed in the backward pass: its features, its numbers, and the state before it
    struct Chunk {
        A *q, *k, *numbers, *sums, *memory_T;
    };

    // the gradients of the state after the current chunk (`log`: of log Σ exp(τ Ô)), and of the powers so far
    struct Gradient {
        A *key_sum, *query_sum, *conserved_key_sum, *conserved_query_sum, *competing_sum, *memory, *memory_T, log;
        Wide<A> tau, gamma;
    };

    void backward_head(int64_t index, A* space) const {
        auto take = [&](int64_t size) { return std::exchange(space, space + padded(size, LINE<A>)); };
        A *sums = take(SUMS * D), *memory = take(D * E);
        Head h = begin(index, sums, memory);
        Chunk recomputed[SEGMENT / CHUNK];
        for (Chunk& chunk : recomputed)
            chunk = {take(CHUNK * D), take(CHUNK * D), take(NUMBERS * CHUNK), take(SUMS * D), take(E * D)};
        A *totals = take(CHUNK * D), *values = take(CHUNK * E), *memory_T = take(E * D);
        A *grad_sums = take(SUMS * D), *grad_memory = take(D * E), *grad_memory_T = take(E * D);

        // the gradient of a state has the layout of a state: use the same functions to read and write it
        Head end = begin(index, grad_sums, grad_memory);
        read_state(end, call.grad_end_sums, call.grad_end_memory, call.grad_end_scalars);
        Gradient grad{grad_sums,         grad_sums + D, grad_sums + 2 * D, grad_sums + 3 * D,
                      grad_sums + 4 * D, grad_memory,   grad_memory_T};
        if (call.grad_end_scalars) grad.log = ((const A*)call.grad_end_scalars)[index * 3 + 1];
        transpose(D, E, grad_memory, E, grad_memory_T, D);
        for (int64_t segment = segments(h) - 1; segment >= 0; segment--) {
            if (segment) recall(h, record(h, segment));
            else read_state(h, call.sums, call.memory, call.scalars);
            transpose(D, E, memory, E, memory_T, D);
            chunks(h, segment, [&](int64_t t, int64_t tokens) {
                const Chunk& chunk = recomputed[t % SEGMENT / CHUNK];
                std::copy_n(h.sums, SUMS * D, chunk.sums);
                std::copy_n(memory_T, E * D, chunk.memory_T);
                load_features(h, t, tokens, chunk.q, chunk.k);
                flows(h, t, tokens, chunk.q, chunk.k, totals, chunk.numbers);
                if (std::min(h.tokens.size, (segment + 1) * SEGMENT) == t + tokens) return;
                load_values(call.value, h.key_head, h, t, tokens, chunk.numbers + COMPETITION * CHUNK, values);
                product<A, true, true>(call.value_dim, D, tokens, values, E, chunk.k, D, memory_T, D);
            });
            const int64_t last = (std::min(h.tokens.size, (segment + 1) * SEGMENT) - 1) / CHUNK * CHUNK;
            for (int64_t t = last; t >= segment * SEGMENT; t -= CHUNK)
                backward_chunk(h, t, std::min(CHUNK, h.tokens.size - t), recomputed[t % SEGMENT / CHUNK], grad, space);
        }
        call.write_grad_powers(index, A(grad.tau), A(grad.gamma));
        if (!call.grad_sums) return;
        write_state(end, call.grad_sums, call.grad_memory);
        A* scalars = (A*)call.grad_scalars + index * 3;
        const bool begun = call.scalars && ((const A*)call.scalars)[index * 3] > 0;
        scalars[0] = 0;
        scalars[1] = call.competition == SOFTMAX_COMPETITION && !begun ? A(0) : grad.log;
        scalars[2] = ((const A*)call.grad_end_scalars)[index * 3 + 2];
    }

    int64_t backward_space() const {
        const int64_t chunk =
            CHUNK * 2 * D + padded(NUMBERS * CHUNK, LINE<A>) + padded(SUMS * D, LINE<A>) + E * D;
        return 2 * SUMS * D + 4 * D * E + CHUNK * E + SEGMENT / CHUNK * chunk +  //
               CHUNK * (8 * D + 4 * E) + 2 * CHUNK * CHUNK + 8 * CHUNK + 256;
    }

    void backward_chunk(const Head& h, int64_t t, int64_t tokens, const Chunk& chunk, Gradient& grad, A* space) const {
        auto take = [&](int64_t size) { return std::exchange(space, space + padded(size, LINE<A>)); };
        A *q = chunk.q, *k = chunk.k, *received = take(CHUNK), *alpha_dalpha = take(CHUNK), *c_dc = take(CHUNK);
        A *conserved_in = take(CHUNK), *conserved_out = take(CHUNK);
        A *grads = take(CHUNK * E), *values = take(CHUNK * E), *grad_values = take(CHUNK * E);
        A* transposed = take(CHUNK * std::max(D, E));
        A *products = take(CHUNK * CHUNK), *grad_products = take(CHUNK * CHUNK);
        A *grad_q = take(CHUNK * D), *grad_k = take(CHUNK * D), *totals = take(CHUNK * 4 * D);
        auto number = [&](int i) { return chunk.numbers + i * CHUNK; };
        const A *position = number(POSITION), *in = number(INVERSE_INCOMING), *out = number(INVERSE_OUTGOING);
        const A* competition = number(COMPETITION);

        // R = α/(I D) (q S + P c V), where S sums the earlier chunks, and P is the lower triangle of q kᵀ
        this->received(tokens, chunk.numbers, received);
        load_values(call.grad, h.head, h, t, tokens, received, grads);
        load_values(call.value, h.key_head, h, t, tokens, competition, values);
        lower_product(tokens, D, call.dim, q, k, transposed, products);
        lower_product(tokens, E, call.value_dim, grads, values, transposed, grad_products);
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
        if (call.renormalize) backward_norm(tokens, chunk, grad, alpha_dalpha, totals, c_dc, grad_q, grad_k);

        for (int64_t i = tokens - 1; i >= 0; i--) {
            const A grad_gate = alpha_dalpha[i] * (1 - number(gate)[i]) * h.gamma;
            conserved_in[i] = call.allocation == NO_ALLOCATION ? A(0) : grad_gate / position[i];
            A flow = 0;
            if (call.competition == SIGMOID_COMPETITION) flow = c_dc[i] * (1 - competition[i]);
            if (call.competition == SOFTMAX_COMPETITION) {
                // exp(L) Σ dL' exp(−L') over this token and later ones, where L is the running log Σ exp(τ Ô)
                grad.log -= c_dc[i];
                flow = c_dc[i] + number(SHARE)[i] * grad.log;
                grad.log *= number(DECAY)[i];
            }
            conserved_out[i] = number(CLAMPED)[i] ? A(0) : flow * h.tau / position[i];
            if (call.powers) {
                grad.tau += flow * number(FLOW)[i];
                grad.gamma += alpha_dalpha[i] * std::log(number(GATE)[i]);
            }
        }
        if (call.renormalize) std::fill_n(alpha_dalpha, tokens, A(0));  // the result does not depend on I directly

        // the four sums up to each token, plus ε: planes of (CHUNK, D) in `totals`
        for (int sum = 0; sum < 4; sum++) {
            const A *x = sum % 2 ? q : k, *factor = sum < 2 ? nullptr : sum % 2 ? in : out;
            auto row = [=](int64_t i, int64_t c) { return (factor ? factor[i] : A(1)) * load(x + i * D + c); };
            running_sums(tokens, row, chunk.sums + sum * D, totals + sum * CHUNK * D);
        }
        features.with_derivative([&](auto derivative) {
            for (int64_t i = tokens - 1; i >= 0; i--) {
                const A *x = q + i * D, *y = k + i * D, *total = totals + i * D;
                add_raised(grad.conserved_key_sum, conserved_in[i], x);
                add_raised(grad.conserved_query_sum, conserved_out[i], y);
                const A through_in = dot(D, x, grad.conserved_query_sum);
                const A through_out = dot(D, y, grad.conserved_key_sum);
                const A flow_in = -(alpha_dalpha[i] + through_in * in[i]) * in[i] / position[i];
                const A flow_out = -through_out * out[i] * out[i] / position[i];
                add_raised(grad.key_sum, flow_in, x);
                add_raised(grad.query_sum, flow_out, y);
                write_row(call.grad_query.at<T>(h.row, h.head, h.tokens.start + t + i), call.dim, [&](int64_t c) {
                    Vector<A> sum = load(grad_q + i * D + c) + load(grad.query_sum + c);
                    sum += flow_in * load(total + c) + conserved_in[i] * load(total + 2 * CHUNK * D + c);
                    return (sum + in[i] * load(grad.conserved_query_sum + c)) * derivative(load(x + c));
                });
                write_source(call.grad_key, call.dim, h, h.tokens.start + t + i, [&](int64_t c) {
                    Vector<A> sum = load(grad_k + i * D + c) + load(grad.key_sum + c);
                    sum += flow_out * load(total + CHUNK * D + c) + conserved_out[i] * load(total + 3 * CHUNK * D + c);
                    return (sum + out[i] * load(grad.conserved_key_sum + c)) * derivative(load(y + c));
                });
            }
        });
    }

    // if renormalised: add the gradients through the norm ⟨q, Σ c k⟩ to c dc and to the gradients of the features
    void backward_norm(int64_t tokens, const Chunk& chunk, const Gradient& grad, const A* alpha_dalpha, A* totals,
                       A* c_dc, A* grad_q, A* grad_k) const {
        const A *competition = chunk.numbers + COMPETITION * CHUNK, *position = chunk.numbers + POSITION * CHUNK;
        competing_sums(tokens, chunk.k, competition, chunk.sums, totals);
        for (int64_t i = tokens - 1; i >= 0; i--) {
            const A grad_norm = -alpha_dalpha[i] * chunk.numbers[norm * CHUNK + i] / position[i];
            add_raised(grad.competing_sum, grad_norm, chunk.q + i * D);
            c_dc[i] += competition[i] * dot(D, chunk.k + i * D, grad.competing_sum);
            add_outer(1, D, &grad_norm, totals + i * D, grad_q + i * D);
            add_outer(1, D, competition + i, grad.competing_sum, grad_k + i * D);
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
        const int64_t space = padded(backward ? backward_space() : forward_space(), LINE<A>);
        const int threads = workers(call);
        advise_results<T>(call, backward);
        Buffer<A> memory(threads * space);
        Pool::run(heads, threads, [&](int64_t index, int worker) {
            backward ? backward_head(index, memory + worker * space) : forward_head(index, memory + worker * space);
        });
    }
};
