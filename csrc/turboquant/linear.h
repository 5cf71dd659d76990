// SPDX-License-Identifier: Apache-2.0
//
// Linear layers whose weights are bf16 and whose arithmetic is float32, for hosts that have no
// bf16 arithmetic: half the memory and half the traffic of widened weights, and exact, because a
// bf16 number is a float32 number.
//
// Layout. Output columns in panels of 32; a panel is `in` rows of 64 bytes, one row per input.
// The 32-bit lane i of a row holds column i of the panel in its low half and column 16 + i in its
// high half, so a shift and a mask widen it. The last panel is filled up with zeros.
//
// One arithmetic. Lanes run along the output; each output is one fused multiply-add after another
// over the inputs in order. A row's result depends on nothing but the row, whatever the number of
// rows, and is the same on every instruction set.
//
// Roofline. A step of decode (few rows) reads every weight once: 2 bytes a weight at the memory's
// bandwidth. A prefill (many rows) is bound by two fused multiply-adds a cycle and core: a block of
// rows keeps its sums in registers for the whole width of the input, so each load of weights serves
// the block and each load of inputs two vectors of columns.
#pragma once

#include <cstdint>

namespace tdsf {

constexpr int kPanelColumns = 32;

struct LinearArgs {
  const float* x;  // [rows, in]
  int64_t rows, x_stride;
  const uint16_t* panels;  // [ceil(out / 32), in, 32]
  int64_t in, out;
  const float* bias;  // [out] or null
  float* y;           // [rows, out]
  int64_t y_stride;
};

// Computes columns of one panel for rows first ... last - 1.
using LinearPanel = void (*)(const LinearArgs&, int64_t panel, int64_t first, int64_t last);

extern const LinearPanel kLinearPortable;
#if defined(__x86_64__)
extern const LinearPanel kLinearAvx2;
extern const LinearPanel kLinearAvx512;
#endif

// Packs weight [out, in] into panels; false where a weight is not a bf16 number, and the panels are
// then of no use.
bool pack_linear(const float* weight, int64_t row_stride, int64_t out, int64_t in,
                 uint16_t* panels);

void linear(const LinearArgs& args);

// y[i] = weight row ids[i], widened: the embedding that shares its weight with the output head.
// Throws std::invalid_argument for an id outside [0, out).
void embed(const int64_t* ids, int64_t count, const uint16_t* panels, int64_t in, int64_t out,
           float* y);

}  // namespace tdsf
