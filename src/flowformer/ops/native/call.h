// The arguments of a call, as `call.py` lays them out, and what both directions need of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "products.h"
#include "threads.h"

// rows of contiguous numbers: where they begin, and the strides of sequences, heads and tokens, in numbers
struct Rows {
    void* data;
    int64_t batch, head, token;

    template <class T> T* at(int64_t sequence, int64_t h, int64_t t) const {
        return (T*)data + sequence * batch + h * head + t * token;
    }
};

struct Call {
    int64_t dtype, threads;
    int64_t sequences, heads, shared;  // `shared`: query heads of a key head
    int64_t sinks, sources, dim, value_dim;
    const int64_t *sink_bounds, *source_bounds;  // of packed sequences, else null
    Rows query, key, value, result;
    Rows grad, grad_query, grad_key, grad_value;  // those of shared key heads: one for each query head, as sums
    const bool *query_mask, *key_mask;            // (sequences, tokens), or null
    Rows sink_flows, source_flows;                // numbers of each token, a plane after another
    int64_t sink_plane, source_plane;
    void* records;  // what is kept of each head, or of each of its segments but the first
    const void *sums, *memory, *scalars;  // the state before the first token, null where there is none
    void *end_sums, *end_memory, *end_scalars;
    const void *grad_end_sums, *grad_end_memory, *grad_end_scalars;
    void *grad_sums, *grad_memory, *grad_scalars;
    int64_t feature_map, competition, allocation, rescale;
    double scale, clamp, eps, flow_eps;
};

enum FeatureMap { SIGMOID_MAP, ELU_MAP, RELU_MAP };
enum Competition { SOFTMAX_COMPETITION, SIGMOID_COMPETITION, NO_COMPETITION };
enum Allocation { SIGMOID_ALLOCATION, NO_ALLOCATION };

constexpr int64_t BLOCK = 48;      // tokens whose rows stay in the first cache; a multiple of the rows of a tile
constexpr int64_t SEGMENT = 1536;  // tokens that are added up before they are added to others: results do not depend
                                   // on how many threads there are

template <class A> struct Buffer {
    explicit Buffer(int64_t size) : data((A*)std::aligned_alloc(64, padded(size * sizeof(A) + 64, 64)), &std::free) {
        if (!data) throw std::bad_alloc();
    }
    std::unique_ptr<A[], decltype(&std::free)> data;
    operator A*() const { return data.get(); }
};

// tokens of one sequence: [start, start + size) of all tokens
struct Span {
    int64_t start, size;
};
inline Span span(const int64_t* bounds, int64_t sequence, int64_t size) {
    return bounds ? Span{bounds[sequence], bounds[sequence + 1] - bounds[sequence]} : Span{0, size};
}

// how many threads are worth waking: each has at least as much to do as waking it takes
inline int workers(const Call& call) {
    const int64_t rows = call.sink_bounds ? 1 : call.sequences;
    const double steps = double(rows * call.heads) * std::max(call.sinks, call.sources) * call.dim * call.value_dim;
    return int(std::max<int64_t>(1, std::min<double>(call.threads, 1 + steps / (1 << 20))));
}

template <class T> class Features {
    using A = Sum<T>;

  public:
    explicit Features(const Call& call)
        : map(call.feature_map), dim(call.dim), width(padded(dim, LANES<A>)), scale(A(call.scale)) {}

    // φ(scale · x) of some tokens; 0 where masked and beyond the last feature
    void operator()(const Rows& rows, int64_t sequence, int64_t head, int64_t first, int64_t tokens, const bool* mask,
                    A* result) const {
        switch (map) {
            case SIGMOID_MAP: return each<SIGMOID_MAP>(rows, sequence, head, first, tokens, mask, result);
            case ELU_MAP: return each<ELU_MAP>(rows, sequence, head, first, tokens, mask, result);
            default: return each<RELU_MAP>(rows, sequence, head, first, tokens, mask, result);
        }
    }

    // f(derivative), where derivative(φ) is that of φ(scale · x) in x
    template <class F> void with_derivative(F f) const {
        using X = Vector<A>;
        switch (map) {
            case SIGMOID_MAP: return f([s = scale](X x) { return s * (x * (1 - x)); });
            case ELU_MAP: return f([s = scale](X x) { return s * smaller(all(A(1)), x); });
            default: return f([s = scale](X x) { return x > 0 ? all(s) : X{}; });
        }
    }

  private:
    int64_t map, dim, width;
    A scale;

    template <int MAP>
    void each(const Rows& rows, int64_t sequence, int64_t head, int64_t first, int64_t tokens, const bool* mask,
              A* result) const {
        for (int64_t t = 0; t < tokens; t++, result += width) {
            if (mask && !mask[t]) {
                std::memset(result, 0, width * sizeof(A));
                continue;
            }
            for_row(rows.at<T>(sequence, head, first + t), dim, [&](int64_t c, Vector<A> x) {
                x *= scale;
                if (MAP == SIGMOID_MAP) x = sigmoid<A>(x);
                if (MAP == ELU_MAP) {
                    x = x > 0 ? x + 1 : exponential<A>(smaller(Vector<A>{}, x));
                }
                if (MAP == RELU_MAP) x = larger(Vector<A>{}, x);
                store(result + c, x);
            });
            for (int64_t c = dim; c < width; c++) result[c] = 0;
        }
    }
};

// x_t · factor_t of some tokens, 0 where masked and beyond the last number
template <class T, class A = Sum<T>>
void scaled_rows(const Rows& rows, int64_t size, int64_t sequence, int64_t head, int64_t first, int64_t tokens,
                 const bool* mask, const A* factor, A* result) {
    const int64_t width = padded(size, LANES<A>);
    for (int64_t t = 0; t < tokens; t++, result += width) {
        if (mask && !mask[t]) {
            std::memset(result, 0, width * sizeof(A));
            continue;
        }
        for_row(rows.at<T>(sequence, head, first + t), size,
                [&](int64_t c, Vector<A> x) { store(result + c, x * factor[t]); });
    }
}

// flows ⟨x, total⟩ of tokens: x · (total + ε) + ε Σ (total + ε) + ε'
template <class A> struct Flow {
    A* raised;  // total + ε
    A rest;

    Flow() = default;
    Flow(const Call& call, const A* total, A* raised) : raised(raised), rest(0) {
        for (int64_t c = 0; c < call.dim; c++) rest += raised[c] = total[c] + A(call.eps);
        for (int64_t c = call.dim; c < padded(call.dim, LANES<A>); c++) raised[c] = 0;
        rest = rest * A(call.eps) + A(call.flow_eps);
    }

    void operator()(int64_t tokens, int64_t width, const A* x, A* result) const {
        dots(tokens, width, x, raised, result);
        for (int64_t t = 0; t < tokens; t++) result[t] += rest;
    }
};

// f(vector) in place of each vector of x
template <class A, class F> void map_tokens(int64_t tokens, A* x, F f) {
    int64_t t = 0;
    for (; t + LANES<A> <= tokens; t += LANES<A>) store(x + t, f(load(x + t)));
    if (t < tokens) write_some(x + t, f(read_some(x + t, tokens - t)), tokens - t);
}
