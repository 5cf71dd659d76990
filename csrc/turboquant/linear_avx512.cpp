// SPDX-License-Identifier: Apache-2.0
//
// linear.h for AVX-512: 12 rows x 32 columns of sums in 24 of 32 registers.
#include <immintrin.h>

#include "linear.h"

namespace tdsf {
namespace {

constexpr int kLanes = 16;
constexpr int kRows = 12;

inline __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

#include "linear_panel.h"

}  // namespace

const LinearPanel kLinearAvx512 = panel_rows;

}  // namespace tdsf
