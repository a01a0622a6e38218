// Products of small matrices that are in cache. Rows are padded to whole vectors. x_row is the stride of x's rows.
#pragma once

#include <type_traits>

#include "vector.h"

// A tile of c = a b, or c += a b if ADD: ROWS rows of COLUMNS vectors. b is (length, columns); a is (rows, length), or
// (length, rows) if TRANSPOSED.
template <class A, int ROWS, int COLUMNS, bool TRANSPOSED, bool ADD>
static void tile(const A* a, int64_t a_row, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t length) {
    Vector<A> total[ROWS][COLUMNS] = {};
    for (int64_t l = 0; l < length; l++) {
        Vector<A> x[COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) x[j] = load(b + l * b_row + j * LANES<A>);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const Vector<A> y = all(TRANSPOSED ? a[l * a_row + i] : a[i * a_row + l]);
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; j++) total[i][j] += y * x[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < COLUMNS; j++) {
            A* p = c + i * c_row + j * LANES<A>;
            store(p, ADD ? load(p) + total[i][j] : total[i][j]);
        }
}

template <class A, int ROWS, int COLUMNS, bool TRANSPOSED, bool ADD>
static void strip(
    int64_t rows, const A* a, int64_t a_row, const A* b, int64_t b_row, A* c, int64_t c_row, int64_t length) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * (TRANSPOSED ? 1 : a_row), c += ROWS * c_row)
        tile<A, ROWS, COLUMNS, TRANSPOSED, ADD>(a, a_row, b, b_row, c, c_row, length);
    if constexpr (ROWS > 1)
        if (rows) strip<A, ROWS - 1, COLUMNS, TRANSPOSED, ADD>(rows, a, a_row, b, b_row, c, c_row, length);
}

// c = a b, or aᵀ b if TRANSPOSED, added to c if ADD; `columns` is a multiple of LANES
template <class A, bool TRANSPOSED, bool ADD>
static void product(int64_t rows, int64_t columns, int64_t length, const A* a, int64_t a_row, const A* b, int64_t b_row,
                    A* c, int64_t c_row) {
    constexpr int64_t lanes = LANES<A>;
    int64_t j = 0;
    for (; j + 2 * lanes <= columns; j += 2 * lanes)
        strip<A, TILE_ROWS, 2, TRANSPOSED, ADD>(rows, a, a_row, b + j, b_row, c + j, c_row, length);
    if (j < columns) strip<A, TILE_ROWS, 1, TRANSPOSED, ADD>(rows, a, a_row, b + j, b_row, c + j, c_row, length);
}

template <class A> inline A dot(int64_t columns, const A* x, const A* y) {
    Vector<A> total = {};
    for (int64_t c = 0; c < columns; c += LANES<A>) total += load(x + c) * load(y + c);
    return sum(total);
}

// result[row] = the sum over the vector f(row)
template <class A, class F> static void sum_each(int64_t rows, A* result, F f) {
    int64_t t = 0;
    if constexpr (std::is_same<A, float>::value)
        for (; t + LANES<A> <= rows; t += LANES<A>) {
            Vector<A> x[LANES<A>];
            for (int i = 0; i < LANES<A>; i++) x[i] = f(t + i);
            store(result + t, sums(x));
        }
    for (; t < rows; t++) result[t] = sum(f(t));
}

// result[t] = Σ_c x_tc
template <class A> static void sum_rows(int64_t rows, int64_t columns, const A* x, A* result) {
    sum_each(rows, result, [=](int64_t t) {
        Vector<A> total = {};
        for (int64_t c = t * columns; c < (t + 1) * columns; c += LANES<A>) total += load(x + c);
        return total;
    });
}

// result[t] = x_t · w
template <class A> static void dots(int64_t rows, int64_t columns, const A* x, const A* w, A* result) {
    sum_each(rows, result, [=](int64_t t) {
        Vector<A> total = {};
        for (int64_t c = 0; c < columns; c += LANES<A>) total += load(x + t * columns + c) * load(w + c);
        return total;
    });
}

// result[t] = x_t · y_t
template <class A> static void row_dots(int64_t rows, int64_t columns, const A* x, const A* y, A* result) {
    sum_each(rows, result, [=](int64_t t) {
        Vector<A> total = {};
        for (int64_t c = t * columns; c < (t + 1) * columns; c += LANES<A>) total += load(x + c) * load(y + c);
        return total;
    });
}

// total += Σ_t weight_t x_t
template <class A>
static void add_weighted(int64_t rows, int64_t columns, const A* weight, const A* x, A* total) {
    constexpr int64_t lanes = LANES<A>;
    int64_t j = 0;
    for (; j + 4 * lanes <= columns; j += 4 * lanes)
        tile<A, 1, 4, false, true>(weight, 0, x + j, columns, total + j, 0, rows);
    for (; j < columns; j += lanes) tile<A, 1, 1, false, true>(weight, 0, x + j, columns, total + j, 0, rows);
}

inline void transpose_square(const double* x, int64_t x_row, double* y, int64_t y_row) {
    for (int i = 0; i < LANES<double>; i++)
        for (int j = 0; j < LANES<double>; j++) y[i * y_row + j] = x[j * x_row + i];
}

// y (columns, rows) = xᵀ; rows and columns are multiples of LANES
template <class A>
static void transpose(int64_t rows, int64_t columns, const A* x, int64_t x_row, A* y, int64_t y_row) {
    for (int64_t i = 0; i < rows; i += LANES<A>)
        for (int64_t j = 0; j < columns; j += LANES<A>)
            transpose_square(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
}
