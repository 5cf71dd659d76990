// SPDX-License-Identifier: Apache-2.0
//
// The panel product of linear.h, kLanes floats wide, kRows rows at most in registers. A variant
// defines both and fused(a, b, c) = a * b + c in one rounding, then includes this file inside its
// unnamed namespace.

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

// Inputs whose weights are asked for ahead of use: 4 KB. Memory takes longer than the processor looks
// ahead, and the hardware's own prefetch stops at every page.
constexpr int kAhead = 64;

// Columns part * kLanes ... of both halves of a panel, for kBlock rows. `fresh`: the panel comes from
// memory.
template <int kBlock>
inline void panel_block(const float* x, int64_t x_stride, const uint16_t* weights, int64_t in,
                        bool fresh, Floats (&low)[kBlock], Floats (&high)[kBlock]) {
  for (int r = 0; r < kBlock; r++) low[r] = high[r] = Floats{};
  for (int64_t i = 0; i < in; i++) {
    if (fresh) __builtin_prefetch(weights + (i + kAhead) * kPanelColumns, 0, 3);
    Words pair;
    __builtin_memcpy(&pair, weights + i * kPanelColumns, sizeof pair);
    const Floats low_column = (Floats)(pair << 16);
    const Floats high_column = (Floats)(pair & 0xffff0000u);
    for (int r = 0; r < kBlock; r++) {
      const Floats input = x[r * x_stride + i] - Floats{};
      low[r] = fused(input, low_column, low[r]);
      high[r] = fused(input, high_column, high[r]);
    }
  }
}

inline void put(const LinearArgs& a, int64_t row, int64_t column, Floats sums) {
  for (int64_t j = column; j < column + kLanes && j < a.out; j++)
    a.y[row * a.y_stride + j] = sums[j - column] + (a.bias ? a.bias[j] : 0.0f);
}

template <int kBlock>
void rows_of_panel(const LinearArgs& a, int64_t panel, int64_t row, bool fresh) {
  const uint16_t* weights = a.panels + panel * a.in * kPanelColumns;
  for (int part = 0; part < kPanelColumns / 2 / kLanes; part++) {
    Floats low[kBlock], high[kBlock];
    panel_block<kBlock>(a.x + row * a.x_stride, a.x_stride, weights + 2 * part * kLanes, a.in,
                        fresh && part == 0, low, high);
    const int64_t column = panel * kPanelColumns + part * kLanes;
    for (int r = 0; r < kBlock; r++) {
      put(a, row + r, column, low[r]);
      put(a, row + r, column + kPanelColumns / 2, high[r]);
    }
  }
}

template <int kBlock>
inline void rows_of_panel(int block, const LinearArgs& a, int64_t panel, int64_t row, bool fresh) {
  if (block == kBlock) return rows_of_panel<kBlock>(a, panel, row, fresh);
  if constexpr (kBlock > 1) rows_of_panel<kBlock - 1>(block, a, panel, row, fresh);
}

// Blocks of equal size: 8 rows with kRows 6 are 4 and 4, not 6 and 2.
void panel_rows(const LinearArgs& a, int64_t panel, int64_t first, int64_t last) {
  for (int64_t row = first; row < last;) {
    const int64_t left = last - row, blocks = (left + kRows - 1) / kRows;
    const int block = static_cast<int>((left + blocks - 1) / blocks);
    rows_of_panel<kRows>(block, a, panel, row, row == first);
    row += block;
  }
}
