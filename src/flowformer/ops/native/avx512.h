// Code that depends on the width of vectors, for AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define VECTOR_BYTES 64
constexpr int TILE_ROWS = 12;  // rows of two vectors in a tile of `products.h`: with the operands, 27 of 32 registers
constexpr int CAUSAL_CHUNK = 32;  // tokens

typedef float FloatVector __attribute__((vector_size(VECTOR_BYTES)));
typedef double DoubleVector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfVector __attribute__((vector_size(VECTOR_BYTES / 2)));

// load and store only the first `size` numbers, fewer than a whole vector; the rest of a loaded vector is 0
inline FloatVector load_some(const float* p, int size) { return _mm512_maskz_loadu_ps((1 << size) - 1, p); }
inline DoubleVector load_some(const double* p, int size) { return _mm512_maskz_loadu_pd((1 << size) - 1, p); }
inline HalfVector load_some(const uint16_t* p, int size) {
    return (HalfVector)_mm256_maskz_loadu_epi16((1 << size) - 1, p);
}

inline void store_some(float* p, FloatVector x, int size) { _mm512_mask_storeu_ps(p, (1 << size) - 1, x); }
inline void store_some(double* p, DoubleVector x, int size) { _mm512_mask_storeu_pd(p, (1 << size) - 1, x); }
inline void store_some(uint16_t* p, HalfVector x, int size) {
    _mm256_mask_storeu_epi16(p, (1 << size) - 1, (__m256i)x);
}

inline double sum(DoubleVector x) { return _mm512_reduce_add_pd(x); }
inline float sum(FloatVector x) { return _mm512_reduce_add_ps(x); }

// quarter l of the result holds the sum of quarter l of each of the 4 vectors
inline __m512 quarter_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d x = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d y = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}

// the sum of each of 16 vectors
inline FloatVector sums(const FloatVector* x) {
    __m512 r[4], s[2];
    for (int i = 0; i < 4; i++, x += 4) r[i] = quarter_sums(x[0], x[1], x[2], x[3]);
    for (int i = 0; i < 2; i++)
        s[i] = _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0xdd);
    return _mm512_shuffle_f32x4(s[0], s[1], 0x88) + _mm512_shuffle_f32x4(s[0], s[1], 0xdd);
}

// y = xᵀ, for a square of LANES × LANES numbers
inline void transpose_square(const float* x, int64_t x_row, float* y, int64_t y_row) {
    __m512 r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(x + i * x_row);
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_shuffle_ps(s[i + j], s[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm512_shuffle_ps(s[i + j], s[i + j + 2], 0xee);
        }
    // r[i + j] holds, in quarter l, column 4 l + j of rows i … i + 3
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < 2; i++) {
            s[4 * j + i] = _mm512_shuffle_f32x4(r[8 * i + j], r[8 * i + j + 4], 0x44);
            s[4 * j + i + 2] = _mm512_shuffle_f32x4(r[8 * i + j], r[8 * i + j + 4], 0xee);
        }
        for (int l = 0; l < 4; l += 2) {
            _mm512_storeu_ps(y + (4 * l + j) * y_row, _mm512_shuffle_f32x4(s[4 * j + l], s[4 * j + l + 1], 0x88));
            _mm512_storeu_ps(y + (4 * l + 4 + j) * y_row, _mm512_shuffle_f32x4(s[4 * j + l], s[4 * j + l + 1], 0xdd));
        }
    }
}
