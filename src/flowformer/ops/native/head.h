// A head of bidirectional Flow-Attention: the location of its tokens and buffers, and the functions of its flows.
#pragma once

#include "call.h"

template <class T> struct BidirectionalHead {
    using A = Sum<T>;

    const Call* call;
    int64_t index, sequence, row, head, key_head;  // `row`: index in the first axis of tensors, 0 if packed
    Span sinks, sources;
    const bool *query_mask, *key_mask;
    A n, m;        // valid sinks and sources
    A tau, gamma;  // powers of competition and allocation
    // kept for the backward pass, one number per token
    A *inverse_incoming, *allocation, *inverse_outgoing, *competition;
    A* inverse_norm;  // likewise: 1/I, or 1/⟨q, Σ c k⟩ if renormalised
    A* gate;          // likewise: α before its power
    A* record;        // kept for the backward pass: the sums of features, then S; or the flow matrix of a short head

    static BidirectionalHead of(const Call& call, int64_t index) {
        BidirectionalHead h{};
        h.call = &call;
        h.index = index;
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
        h.tau = call.tau<A>(h.head);
        h.gamma = call.gamma<A>(h.head);
        // layout of `kept`: the records of all heads, then planes of one number per token
        const int64_t record_size = call.record_size<A>();
        h.record = (A*)call.kept + index * record_size;
        A* planes = (A*)call.kept + call.sequences * call.heads * record_size;
        const int64_t plane_row = h.row * call.heads + h.head, plane_rows = call.rows() * call.heads;
        auto next_plane = [&](int64_t tokens, Span span) {
            return std::exchange(planes, planes + plane_rows * tokens) + plane_row * tokens + span.start;
        };
        h.inverse_incoming = next_plane(call.sinks, h.sinks);
        h.allocation = next_plane(call.sinks, h.sinks);
        h.inverse_norm = call.renormalize ? next_plane(call.sinks, h.sinks) : h.inverse_incoming;
        h.gate = call.powers ? next_plane(call.sinks, h.sinks) : h.allocation;
        h.inverse_outgoing = next_plane(call.sources, h.sources);
        h.competition = next_plane(call.sources, h.sources);
        return h;
    }

    static A count(const bool* mask, int64_t size) { return mask ? A(std::count(mask, mask + size, true)) : A(size); }

    static const bool* at(const bool* mask, int64_t t) { return mask ? mask + t : nullptr; }

    void queries(const Features<T>& features, int64_t t, int64_t tokens, A* result) const {
        features(call->query, row, head, sinks.start + t, tokens, at(query_mask, t), result);
    }
    void keys(const Features<T>& features, int64_t t, int64_t tokens, A* result) const {
        features(call->key, row, key_head, sources.start + t, tokens, at(key_mask, t), result);
    }
    // c V
    void values(int64_t t, int64_t tokens, A* result) const {
        scaled_rows<T>(call->value, call->value_dim, row, key_head, sources.start + t, tokens, at(key_mask, t),
                       competition + t, result);
    }
    // dR α/I; if renormalised, with the norm in place of I. `factor` gets α/I.
    void grads(int64_t t, int64_t tokens, A* factor, A* result) const {
        for (int64_t i = 0; i < tokens; i++) factor[i] = allocation[t + i] * inverse_norm[t + i];
        scaled_rows<T>(call->grad, call->value_dim, row, head, sinks.start + t, tokens, at(query_mask, t), factor,
                       result);
    }

    // write R = rows · α/I; if renormalised, with the norm in place of I
    void write_result(int64_t t, int64_t tokens, const A* rows, int64_t width) const {
        for (int64_t i = 0; i < tokens; i++) {
            const A received = allocation[t + i] * inverse_norm[t + i];
            write_row(call->result.at<T>(row, head, sinks.start + t + i), call->value_dim,
                      [&](int64_t c) { return load(rows + i * width + c) * received; });
        }
    }
    // write dV = rows · c
    void write_grad_value(int64_t t, int64_t tokens, const A* rows, int64_t width) const {
        for (int64_t i = 0; i < tokens; i++)
            write_source(call->grad_value, call->value_dim, sources.start + t + i,
                         [&](int64_t c) { return load(rows + i * width + c) * competition[t + i]; });
    }
    // write a row of dK or dV; the caller sums the rows of query heads that share a key head, in type A
    template <class F> void write_source(const Rows& rows, int64_t size, int64_t token, F f) const {
        if (call->shared > 1) write_row(rows.at<A>(row, head, token), size, f);
        else write_row(rows.at<T>(row, head, token), size, f);
    }

    A ratio() const { return call->rescale ? n / std::max(m, A(1)) : A(1); }

    // From Ô, store in `competition` and `flow`: τ Ô after the clamp (−∞ where masked) for a softmax, else c (0 where
    // masked)
    void compete(int64_t t, int64_t tokens, A* flow) const {
        const A clamp = A(call->clamp);
        if (call->competition == NO_COMPETITION) std::fill_n(flow, tokens, A(1));
        else
            map_tokens(tokens, flow, [&](Vector<A> x) {
                x = x < -clamp ? all(-clamp) : x;
                x = x > clamp ? all(clamp) : x;
                return call->competition == SIGMOID_COMPETITION ? sigmoid<A>(x) : x * tau;
            });
        const A nothing = call->competition == SOFTMAX_COMPETITION ? -std::numeric_limits<A>::infinity() : A(0);
        if (key_mask)
            for (int64_t i = 0; i < tokens; i++) flow[i] = key_mask[t + i] ? flow[i] : nothing;
        std::copy_n(flow, tokens, competition + t);
    }

    // replace the stored τ Ô by exp(τ Ô − maximum); returns the sum
    A exponentials(int64_t t, int64_t tokens, A maximum) const {
        A *c = competition + t, total = 0;
        map_tokens(tokens, c, [&](Vector<A> x) { return exponential<A>(x - maximum); });
        for (int64_t i = 0; i < tokens; i++) total += c[i];
        return total;
    }

    // the factor that turns exponentials with this sum into c
    A share(A total) const { return total > 0 ? (call->rescale ? m : A(1)) / total : A(0); }

    // from Î, store α in `allocation` and `flow`
    void allocate(int64_t t, int64_t tokens, A* flow) const {
        const A r = ratio();
        if (call->allocation == NO_ALLOCATION) std::fill_n(flow, tokens, A(1));
        else map_tokens(tokens, flow, [&](Vector<A> x) { return sigmoid<A>(x * r); });
        if (call->powers) {
            std::copy_n(flow, tokens, gate + t);
            for (int64_t i = 0; i < tokens; i++) flow[i] = std::pow(flow[i], gamma);
        }
        if (query_mask)
            for (int64_t i = 0; i < tokens; i++) flow[i] = query_mask[t + i] ? flow[i] : A(0);
        std::copy_n(flow, tokens, allocation + t);
    }

    // dÎ from α dα; returns Σ dÎ
    A grad_allocation(int64_t t, int64_t tokens, const A* alpha_dalpha, A* grad) const {
        const A r = call->allocation == NO_ALLOCATION ? A(0) : ratio() * gamma;
        A total = 0;
        for (int64_t i = 0; i < tokens; i++) total += grad[i] = alpha_dalpha[i] * (1 - gate[t + i]) * r;
        return total;
    }
    // dγ from α dα
    A grad_gamma(int64_t t, int64_t tokens, const A* alpha_dalpha) const {
        Wide<A> total = 0;
        for (int64_t i = 0; i < tokens; i++) total += alpha_dalpha[i] * std::log(gate[t + i]);
        return A(total);
    }
    // If renormalised: the gradient of the norm from α dα; returns the sum. Zeroes `alpha_dalpha`, since the result
    // does not depend on I directly.
    A grad_norm(int64_t t, int64_t tokens, A* alpha_dalpha, A* grad) const {
        A total = 0;
        for (int64_t i = 0; i < tokens; i++)
            total += grad[i] = -std::exchange(alpha_dalpha[i], A(0)) * inverse_norm[t + i];
        return total;
    }

    // d(τ Ô) from c dc and Σ c dc over all sources
    void grad_competition(int64_t t, int64_t tokens, const A* c_dc, A shared_loss, A* grad) const {
        const A *c = competition + t, loss = shared_loss / (call->rescale ? std::max(m, A(1)) : A(1));
        for (int64_t i = 0; i < tokens; i++)
            grad[i] = call->competition == SOFTMAX_COMPETITION   ? c_dc[i] - c[i] * loss
                      : call->competition == SIGMOID_COMPETITION ? c_dc[i] * (1 - c[i])
                                                                 : A(0);
    }
    // whether `grad_flow` must be called, for which Ô is recomputed
    bool needs_flow() const { return call->powers || !std::isinf(call->clamp); }
    // replace d(τ Ô) by dÔ, 0 where Ô was clamped; returns dτ
    A grad_flow(int64_t tokens, const A* flow, A* grad) const {
        const A clamp = A(call->clamp);
        Wide<A> total = 0;
        for (int64_t i = 0; i < tokens; i++) {
            total += grad[i] * smaller(clamp, larger(-clamp, flow[i]));
            grad[i] = std::abs(flow[i]) > clamp ? A(0) : grad[i] * tau;
        }
        return A(total);
    }
};
