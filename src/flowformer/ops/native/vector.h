// Vector types, elementwise functions, and loads and stores for each dtype.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

template <class A> struct VectorOf;
template <> struct VectorOf<float> {
    typedef FloatVector type;
    typedef int32_t bits __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int mantissa = 23, bias = 127;
    static constexpr float lowest = -88.0f, highest = 89.0f;  // arguments whose exp is 0 and infinity
    static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.428606820309417e-06f;
    static constexpr int terms = 7;  // degree of the Taylor polynomial of exp
};
template <> struct VectorOf<double> {
    typedef DoubleVector type;
    typedef int64_t bits __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int mantissa = 52, bias = 1023;
    static constexpr double lowest = -709.1, highest = 709.9;
    static constexpr double ln2_high = 0.693147180369123816490, ln2_low = 1.90821492927058770002e-10;
    static constexpr int terms = 13;
};
template <class A> using Vector = typename VectorOf<A>::type;
template <class A> using Bits = typename VectorOf<A>::bits;
template <class A> constexpr int LANES = VECTOR_BYTES / sizeof(A);

template <class A> constexpr int LINE = 64 / sizeof(A);  // numbers in a cache line, the alignment of all buffers

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <class A> inline Vector<A> all(A x) { return x - Vector<A>{}; }

template <class A> inline Vector<A> load(const A* p) {
    Vector<A> x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <class A> inline void store(A* p, Vector<A> x) { std::memcpy(p, &x, sizeof x); }

// y if either is NaN
template <class X> inline X larger(X x, X y) { return x > y ? x : y; }
template <class X> inline X smaller(X x, X y) { return x < y ? x : y; }

// 1/i!, the Taylor coefficients of exp
template <class A> struct Series {
    A of[VectorOf<A>::terms + 1] = {1};
    constexpr Series() {
        double factorial = 1;
        for (int i = 1; i <= VectorOf<A>::terms; i++) of[i] = A(1 / (factorial *= i));
    }
};

// 2^n · (series of exp at the rest), which is at most ln 2 / 2; NaN stays NaN
template <class A> inline Vector<A> exponential(Vector<A> x) {
    using Of = VectorOf<A>;
    constexpr A shift = A(3ll << (Of::mantissa - 1));  // its last bit is worth 1
    const Vector<A> y = smaller(all(Of::highest), larger(all(Of::lowest), x));
    Vector<A> shifted = y * A(1.44269504088896340736) + shift, n = shifted - shift;
    Vector<A> rest = y - n * Of::ln2_high;
    rest -= n * Of::ln2_low;
    constexpr Series<A> coefficients;
    Vector<A> series = all(coefficients.of[Of::terms]);
#pragma GCC unroll 16
    for (int i = Of::terms - 1; i >= 0; i--) series = series * rest + coefficients.of[i];
    Bits<A> exponent = (Bits<A>)shifted - (Bits<A>)all(shift) + Of::bias;
    return series * (Vector<A>)(exponent << Of::mantissa);
}

template <class A> inline Vector<A> sigmoid(Vector<A> x) { return 1 / (1 + exponential<A>(-x)); }

struct bfloat16 {
    uint16_t bits;
};

template <class T> struct SumOf { typedef T type; };
template <> struct SumOf<bfloat16> { typedef float type; };
template <class T> using Sum = typename SumOf<T>::type;  // the dtype of sums of T

template <class A> struct WideOf { typedef double type; };
template <> struct WideOf<double> { typedef long double type; };
template <class A> using Wide = typename WideOf<A>::type;  // a more precise dtype, for long sums of scalars

inline Vector<float> widened(HalfVector x) { return (Vector<float>)(__builtin_convertvector(x, Bits<float>) << 16); }
inline HalfVector narrowed(Vector<float> x) {
    typedef uint32_t whole __attribute__((vector_size(VECTOR_BYTES)));
    whole bits = (whole)x;
    bits += 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
    bits = x != x ? whole{} + 0x7fc00000 : bits;
    return __builtin_convertvector(bits >> 16, HalfVector);
}

inline Vector<float> read(const float* p) { return load(p); }
inline Vector<double> read(const double* p) { return load(p); }
inline Vector<float> read(const bfloat16* p) {
    HalfVector x;
    std::memcpy(&x, p, sizeof x);
    return widened(x);
}
inline void write(float* p, Vector<float> x) { store(p, x); }
inline void write(double* p, Vector<double> x) { store(p, x); }
inline void write(bfloat16* p, Vector<float> x) {
    const HalfVector half = narrowed(x);
    std::memcpy(p, &half, sizeof half);
}

// the last vector of a row, of `size` numbers, fewer than a whole vector
template <class A> inline Vector<A> read_some(const A* p, int64_t size) { return load_some(p, int(size)); }
template <class A> inline void write_some(A* p, Vector<A> x, int64_t size) { store_some(p, x, int(size)); }
inline Vector<float> read_some(const bfloat16* p, int64_t size) { return widened(load_some(&p->bits, int(size))); }
inline void write_some(bfloat16* p, Vector<float> x, int64_t size) { store_some(&p->bits, narrowed(x), int(size)); }

// Call f(column, vector) for each vector of a row; the last one is padded with zeros
template <class T, class F> inline void for_row(const T* row, int64_t size, F f) {
    constexpr int64_t lanes = LANES<Sum<T>>;
    int64_t c = 0;
    for (; c + lanes <= size; c += lanes) f(c, read(row + c));
    if (c < size) f(c, read_some(row + c, size - c));
}

// Write f(column) to each vector of a row
template <class T, class F> inline void write_row(T* row, int64_t size, F f) {
    constexpr int64_t lanes = LANES<Sum<T>>;
    int64_t c = 0;
    for (; c + lanes <= size; c += lanes) write(row + c, f(c));
    if (c < size) write_some(row + c, f(c), size - c);
}
