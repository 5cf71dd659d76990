// SPDX-License-Identifier: Apache-2.0
//
// linear.h on any CPU. On aarch64 the compiler makes vector instructions of the fused products (8 of
// the 18 of the inner loop), so NEON has no file of its own.
#include <cmath>

#include "linear.h"

namespace tdsf {
namespace {

constexpr int kLanes = 4;
constexpr int kRows = 4;
using Floats4 = float __attribute__((vector_size(16)));

inline Floats4 fused(Floats4 a, Floats4 b, Floats4 c) {
  for (int i = 0; i < 4; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}

#include "linear_panel.h"

}  // namespace

const LinearPanel kLinearPortable = panel_rows;

}  // namespace tdsf
