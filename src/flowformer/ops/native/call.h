// The arguments of a call, in the layout of `call.py`, and code shared by bidirectional and causal attention.
//
// Types: T is the dtype of the inputs, A = Sum<T> the dtype of sums. D (`dim`) features, E (`value_dim`) values.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "products.h"
#include "threads.h"

// A tensor (sequences, heads, tokens, features) with contiguous features: its data, and the other strides in numbers
struct Rows {
    void* data;
    int64_t batch, head, token;

    template <class T> T* at(int64_t sequence, int64_t h, int64_t t) const {
        return (T*)data + sequence * batch + h * head + t * token;
    }
};

// The sums of features of a head, over tokens: Σk, Σq, Σk/O, Σq/I and, if renormalised, Σ c k. In records of gradients,
// the gradient of each.
enum FeatureSum { KEY_SUM, QUERY_SUM, CONSERVED_KEY_SUM, CONSERVED_QUERY_SUM, COMPETING_SUM, FEATURE_SUMS };

// One vector of D numbers for each of them
template <class A> struct FeatureSums {
    A* data;
    int64_t D;

    A* operator[](int which) const { return data + which * D; }
};

// Only 64-bit fields, in the order in which `call.py` packs them
struct Call {
    int64_t dtype, threads;
    int64_t sequences, heads, shared;  // `shared`: number of query heads per key head
    int64_t sinks, sources, dim, value_dim;
    Rows query, key, value, result;
    // `grad`: of the result. If key heads are shared, grad_key and grad_value have one row per query head, of type A
    Rows grad, grad_query, grad_key, grad_value;
    const int64_t *sink_bounds, *source_bounds;  // of packed sequences, else null
    const bool *query_mask, *key_mask;           // (sequences, tokens), or null
    void* kept;                                  // written by the forward pass, read by the backward pass
    const void *sums, *memory, *scalars;         // the state before the first token, or null
    void *end_sums, *end_memory, *end_scalars;   // the state after the last token
    const void *grad_end_sums, *grad_end_memory, *grad_end_scalars;
    void *grad_sums, *grad_memory, *grad_scalars;
    const void* powers;  // (2, heads): τ, then γ; null if all are 1
    void* grad_powers;   // (2, sequences, heads): dτ, then dγ
    int64_t feature_map, competition, allocation, rescale, renormalize;
    double scale, clamp, eps, flow_eps;

    int64_t rows() const { return sink_bounds ? 1 : sequences; }  // size of the first axis of query and result

    int64_t feature_sums() const { return renormalize ? FEATURE_SUMS : FEATURE_SUMS - 1; }  // number of them per head

    // size of the sums of features and S of one head in `kept`, as in `_record_size` of `op.py`
    template <class A> int64_t record_size() const {
        return (feature_sums() + padded(value_dim, LINE<A>)) * padded(dim, LINE<A>);
    }

    template <class A> A tau(int64_t head) const { return powers ? ((const A*)powers)[head] : A(1); }
    template <class A> A gamma(int64_t head) const { return powers ? ((const A*)powers)[heads + head] : A(1); }

    template <class A> void write_grad_powers(int64_t index, A grad_tau, A grad_gamma) const {
        if (!powers) return;
        ((A*)grad_powers)[index] = grad_tau;
        ((A*)grad_powers)[sequences * heads + index] = grad_gamma;
    }
};

enum FeatureMap { SIGMOID_MAP, ELU_MAP, RELU_MAP };
enum Competition { SOFTMAX_COMPETITION, SIGMOID_COMPETITION, NO_COMPETITION };
enum Allocation { SIGMOID_ALLOCATION, NO_ALLOCATION };

constexpr int64_t BLOCK = 48;  // tokens whose rows stay in the L1 cache; a multiple of TILE_ROWS
// Tokens per partial sum of bidirectional attention. Partial sums are added in order, so that results do not depend on
// the number of threads.
constexpr int64_t SEGMENT = 1536;

// Ask for huge pages: page faults of small pages on fresh memory take longer than the computation of most calls
inline void advise(void* data, int64_t bytes) {
    constexpr uintptr_t huge = 2 << 20;
    const uintptr_t start = ((uintptr_t)data + huge - 1) / huge * huge, stop = ((uintptr_t)data + bytes) / huge * huge;
    if (start < stop) madvise((void*)start, stop - start, MADV_HUGEPAGE);
}

// Scratch memory of one call. Each thread keeps the block of its last call, so that the next call has no page faults.
template <class A> class Buffer {
  public:
    explicit Buffer(int64_t size) : block(std::exchange(spare(), {})) {
        const int64_t bytes = padded(size * sizeof(A) + 64, 64);
        if (block.bytes >= bytes) return;
        block = Block(bytes);
        advise(block.data.get(), bytes);
    }
    ~Buffer() {
        if (block.bytes <= KEPT) spare() = std::move(block);
    }
    operator A*() const { return (A*)block.data.get(); }

  private:
    static constexpr int64_t KEPT = 64 << 20;  // bytes; larger blocks are freed

    struct Block {
        std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
        int64_t bytes = 0;

        Block() = default;
        explicit Block(int64_t bytes) : data(std::aligned_alloc(64, bytes), &std::free), bytes(bytes) {
            if (!data) throw std::bad_alloc();
        }
    };
    Block block;

    static Block& spare() {
        static thread_local Block block;
        return block;
    }
};

// Divides a buffer into arrays, each of which starts on a cache line. Without a buffer, only adds up their sizes.
template <class A> class Arena {
  public:
    explicit Arena(A* start = nullptr) : start(start), end(start) {}

    A* take(int64_t size) { return std::exchange(end, end + padded(size, LINE<A>)); }
    int64_t size() const { return end - start; }

  private:
    A *start, *end;
};

// The tokens [start, start + size) of one sequence
struct Span {
    int64_t start, size;
};
inline Span span(const int64_t* bounds, int64_t sequence, int64_t size) {
    return bounds ? Span{bounds[sequence], bounds[sequence + 1] - bounds[sequence]} : Span{0, size};
}

constexpr double WORTH = 1 << 20;  // multiplications that take about as long as waking a thread

// Estimate of the multiplications of a call
inline double steps(const Call& call) {
    return double(call.rows() * call.heads) * std::max(call.sinks, call.sources) * call.dim * call.value_dim;
}

// The number of threads to use: each must have at least as much work as waking it costs
inline int workers(const Call& call) {
    return int(std::max<int64_t>(1, std::min<double>(call.threads, 1 + steps(call) / WORTH)));
}

// The number of consecutive heads that a thread takes at a time: several, since numbers of neighbouring heads share
// cache lines, but few enough to keep all threads busy
inline int64_t neighbours(const Call& call, int64_t heads, int threads) {
    const double few = std::min(WORTH * heads / (1 + steps(call)), heads / (4.0 * threads));
    return std::max<int64_t>(1, int64_t(few));
}

// Ask for huge pages for the outputs, before they are written
template <class T> void advise_results(const Call& call, bool backward) {
    const int64_t heads = call.rows() * call.heads, size = call.shared > 1 ? sizeof(Sum<T>) : sizeof(T);
    if (!backward) return advise(call.result.data, heads * call.sinks * call.value_dim * sizeof(T));
    advise(call.grad_query.data, heads * call.sinks * call.dim * sizeof(T));
    advise(call.grad_key.data, heads * call.sources * call.dim * size);
    advise(call.grad_value.data, heads * call.sources * call.value_dim * size);
}

template <class T> class Features {
    using A = Sum<T>;

  public:
    explicit Features(const Call& call)
        : map(call.feature_map), dim(call.dim), width(padded(dim, LANES<A>)), scale(A(call.scale)) {}

    // φ(scale · x) of consecutive tokens; 0 where masked and in the padding of a row
    void operator()(const Rows& rows, int64_t sequence, int64_t head, int64_t first, int64_t tokens, const bool* mask,
                    A* result) const {
        switch (map) {
            case SIGMOID_MAP: return each<SIGMOID_MAP>(rows, sequence, head, first, tokens, mask, result);
            case ELU_MAP: return each<ELU_MAP>(rows, sequence, head, first, tokens, mask, result);
            default: return each<RELU_MAP>(rows, sequence, head, first, tokens, mask, result);
        }
    }

    // Call f(derivative), where derivative(φ) is the derivative of φ(scale · x) by x, as a function of φ
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

// x_t · factor_t of consecutive tokens; 0 where masked and in the padding of a row
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

// The flow of each token x through the sum `total`: (x + ε) · (total + ε) + ε', computed as
// x · (total + ε) + ε Σ_c (total_c + ε) + ε'
template <class A> struct Flow {
    A* raised;  // total + ε
    A rest;     // the terms that do not depend on x

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

// x += column rowᵀ, for x (tokens, width)
template <class A> void add_outer(int64_t tokens, int64_t width, const A* column, const A* row, A* x) {
    for (int64_t t = 0; t < tokens; t++, x += width)
        for (int64_t c = 0; c < width; c += LANES<A>) store(x + c, load(x + c) + column[t] * load(row + c));
}

// Replace each vector of x by f(vector)
template <class A, class F> void map_tokens(int64_t tokens, A* x, F f) {
    int64_t t = 0;
    for (; t + LANES<A> <= tokens; t += LANES<A>) store(x + t, f(load(x + t)));
    if (t < tokens) write_some(x + t, f(read_some(x + t, tokens - t)), tokens - t);
}
