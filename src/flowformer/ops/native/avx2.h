// Code that depends on the width of vectors, for AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define VECTOR_BYTES 32
constexpr int TILE_ROWS = 6;  // rows of two vectors in a tile of `products.h`: with the operands, 15 of 16 registers
constexpr int CAUSAL_CHUNK = 24;  // tokens

typedef float FloatVector __attribute__((vector_size(VECTOR_BYTES)));
typedef double DoubleVector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfVector __attribute__((vector_size(VECTOR_BYTES / 2)));

// the mask of the first `size` of 8 floats, or of the first `size / 2` of 4 doubles
inline __m256i first(int size) {
    static const int32_t bits[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i*)(bits + 8 - size));
}

// load and store only the first `size` numbers, fewer than a whole vector; the rest of a loaded vector is 0
inline FloatVector load_some(const float* p, int size) { return _mm256_maskload_ps(p, first(size)); }
inline DoubleVector load_some(const double* p, int size) { return _mm256_maskload_pd(p, first(2 * size)); }
inline HalfVector load_some(const uint16_t* p, int size) {
    HalfVector x = {};
    std::memcpy(&x, p, size * sizeof *p);
    return x;
}

inline void store_some(float* p, FloatVector x, int size) { _mm256_maskstore_ps(p, first(size), x); }
inline void store_some(double* p, DoubleVector x, int size) { _mm256_maskstore_pd(p, first(2 * size), x); }
inline void store_some(uint16_t* p, HalfVector x, int size) { std::memcpy(p, &x, size * sizeof *p); }

inline double sum(DoubleVector x) {
    const __m128d half = _mm256_castpd256_pd128(x) + _mm256_extractf128_pd(x, 1);
    return half[0] + half[1];
}

inline float sum(FloatVector x) {
    __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    half += _mm_movehl_ps(half, half);
    return half[0] + half[1];
}

// the sum of each of 8 vectors
inline FloatVector sums(const FloatVector* x) {
    __m256 r[2];
    for (int i = 0; i < 2; i++, x += 4)
        r[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm256_permute2f128_ps(r[0], r[1], 0x20) + _mm256_permute2f128_ps(r[0], r[1], 0x31);
}

// y = xᵀ, for a square of LANES × LANES numbers
inline void transpose_square(const float* x, int64_t x_row, float* y, int64_t y_row) {
    __m256 r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(x + i * x_row);
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(s[i + j], s[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(s[i + j], s[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(y + i * y_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(y + (i + 4) * y_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
