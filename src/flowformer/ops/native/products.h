// Products of small matrices that are in cache. Rows are padded to whole vectors.
#pragma once

#include "vector.h"

// ROWS × COLUMNS vectors of c (+)= a b, where b is length × columns, and a is rows × length, or its transpose
template <class A, int ROWS, int COLUMNS, bool TRANSPOSED, bool ADD>
static void tile(const A* a, int64_t a_row, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t length) {
    Vector<A> total[ROWS][COLUMNS] = {};
    for (int64_t l = 0; l < length; l++) {
        Vector<A> x[COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) x[j] = load(b + l * b_row + j * LANES<A>);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            const Vector<A> y = all(TRANSPOSED ? a[l * a_row + i] : a[i * a_row + l]);
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) total[i][j] += y * x[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) {
            A* p = c + i * c_row + j * LANES<A>;
            store(p, ADD ? load(p) + total[i][j] : total[i][j]);
        }
}

template <class A, int COLUMNS, bool TRANSPOSED, bool ADD>
static void strip(
    int64_t rows, const A* a, int64_t a_row, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t length) {
    const int64_t step = TRANSPOSED ? 1 : a_row;
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6)
        tile<A, 6, COLUMNS, TRANSPOSED, ADD>(a + i * step, a_row, b, b_row, c + i * c_row, c_row, length);
    a += i * step;
    c += i * c_row;
    switch (rows - i) {
        case 5: return tile<A, 5, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
        case 4: return tile<A, 4, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
        case 3: return tile<A, 3, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
        case 2: return tile<A, 2, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
        case 1: return tile<A, 1, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
    }
}

// c (+)= a b, or aᵀ b if TRANSPOSED; `columns` is a whole number of vectors
template <class A, bool TRANSPOSED, bool ADD>
static void product(int64_t rows, int64_t columns, int64_t length, const A* a, int64_t a_row, const A* b, int64_t b_row,
                    A* c, int64_t c_row) {
    constexpr int64_t lanes = LANES<A>;
    int64_t j = 0;
    for (; j + 2 * lanes <= columns; j += 2 * lanes)
        strip<A, 2, TRANSPOSED, ADD>(rows, a, a_row, b + j, b_row, c + j, c_row, length);
    if (j < columns) strip<A, 1, TRANSPOSED, ADD>(rows, a, a_row, b + j, b_row, c + j, c_row, length);
}

// x_t · w of each row of x
template <class A> static void dots(int64_t rows, int64_t columns, const A* x, const A* w, A* result) {
    for (int64_t t = 0; t < rows; t++) {
        Vector<A> total = {};
        for (int64_t c = 0; c < columns; c += LANES<A>) total += load(x + t * columns + c) * load(w + c);
        result[t] = sum<A>(total);
    }
}

// x_t · y_t of each row
template <class A> static void row_dots(int64_t rows, int64_t columns, const A* x, const A* y, A* result) {
    for (int64_t t = 0; t < rows; t++) {
        Vector<A> total = {};
        for (int64_t c = t * columns; c < (t + 1) * columns; c += LANES<A>) total += load(x + c) * load(y + c);
        result[t] = sum<A>(total);
    }
}

// total += Σ_t weight_t x_t
template <class A>
static void add_weighted(int64_t rows, int64_t columns, const A* weight, const A* x, A* total) {
    product<A, false, true>(1, columns, rows, weight, 0, x, columns, total, 0);
}

// a square of one vector in each direction
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
inline void transpose_square(const double* x, int64_t x_row, double* y, int64_t y_row) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) y[i * y_row + j] = x[j * x_row + i];
}

// y (columns × rows) = xᵀ, both in whole vectors
template <class A>
static void transpose(int64_t rows, int64_t columns, const A* x, int64_t x_row, A* y, int64_t y_row) {
    for (int64_t i = 0; i < rows; i += LANES<A>)
        for (int64_t j = 0; j < columns; j += LANES<A>)
            transpose_square(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
}
