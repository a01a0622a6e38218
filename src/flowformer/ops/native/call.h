// The arguments of a call, as `call.py` lays them out, and what both directions need of them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

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

// only 64-bit numbers, in the order in which `call.py` packs them
struct Call {
    int64_t dtype, threads;
    int64_t sequences, heads, shared;  // `shared`: query heads of a key head
    int64_t sinks, sources, dim, value_dim;
    Rows query, key, value, result;
    Rows grad, grad_query, grad_key, grad_value;  // those of shared key heads: one for each query head, as sums
    const int64_t *sink_bounds, *source_bounds;   // of packed sequences, else null
    const bool *query_mask, *key_mask;            // (sequences, tokens), or null
    void* kept;                                   // by the forward pass, for the backward pass
    const void *sums, *memory, *scalars;          // the state before the first token, null where there is none
    void *end_sums, *end_memory, *end_scalars;
    const void *grad_end_sums, *grad_end_memory, *grad_end_scalars;
    void *grad_sums, *grad_memory, *grad_scalars;
    const void* powers;  // τ of each head, then γ; null where they are 1
    void* grad_powers;   // of each head of each sequence: dτ, then dγ
    int64_t feature_map, competition, allocation, rescale, renormalize;
    double scale, clamp, eps, flow_eps;

    int64_t rows() const { return sink_bounds ? 1 : sequences; }  // of tensors with `heads` heads

    // sums of features that a head has: Σk, Σq, Σk/O, Σq/I and, if renormalised, Σ c k
    int64_t feature_sums() const { return renormalize ? 5 : 4; }

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

constexpr int64_t BLOCK = 48;      // tokens whose rows stay in the first cache; a multiple of the rows of a tile
constexpr int64_t SEGMENT = 1536;  // tokens that are added up before they are added to others: results do not depend
                                   // on how many threads there are

// Asks for huge pages where memory is fresh: to hand out small ones takes the system longer than most calls compute
inline void advise(void* data, int64_t bytes) {
    constexpr uintptr_t huge = 2 << 20;
    const uintptr_t start = ((uintptr_t)data + huge - 1) / huge * huge, stop = ((uintptr_t)data + bytes) / huge * huge;
    if (start < stop) madvise((void*)start, stop - start, MADV_HUGEPAGE);
}

// Memory for one call. Each thread keeps what its last call used, so that the next finds it with pages in place.
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
    static constexpr int64_t KEPT = 64 << 20;

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

// tokens of one sequence: [start, start + size) of all tokens
struct Span {
    int64_t start, size;
};
inline Span span(const int64_t* bounds, int64_t sequence, int64_t size) {
    return bounds ? Span{bounds[sequence], bounds[sequence + 1] - bounds[sequence]} : Span{0, size};
}

constexpr double WORTH = 1 << 20;  // multiplications that take about as long as to wake a thread

inline double steps(const Call& call) {
    return double(call.rows() * call.heads) * std::max(call.sinks, call.sources) * call.dim * call.value_dim;
}

// how many threads are worth waking: each has at least as much to do as waking it takes
inline int workers(const Call& call) {
    return int(std::max<int64_t>(1, std::min<double>(call.threads, 1 + steps(call) / WORTH)));
}

// heads that a thread takes at a time: neighbours, whose numbers share cache lines, but no more than leaves all busy
inline int64_t neighbours(const Call& call, int64_t heads, int threads) {
    const double few = std::min(WORTH * heads / (1 + steps(call)), heads / (4.0 * threads));
    return std::max<int64_t>(1, int64_t(few));
}

// before results of T are written
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

// rows of x += column rowᵀ
template <class A> void add_outer(int64_t tokens, int64_t width, const A* column, const A* row, A* x) {
    for (int64_t t = 0; t < tokens; t++, x += width)
        for (int64_t c = 0; c < width; c += LANES<A>) store(x + c, load(x + c) + column[t] * load(row + c));
}

// f(vector) in place of each vector of x
template <class A, class F> void map_tokens(int64_t tokens, A* x, F f) {
    int64_t t = 0;
    for (; t + LANES<A> <= tokens; t += LANES<A>) store(x + t, f(load(x + t)));
    if (t < tokens) write_some(x + t, f(read_some(x + t, tokens - t)), tokens - t);
}
