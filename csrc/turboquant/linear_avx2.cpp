// SPDX-License-Identifier: Apache-2.0
//
// linear.h for AVX2 and FMA: 6 rows x 16 columns of sums in 12 of 16 registers.
#include <immintrin.h>

#include "linear.h"

namespace tdsf {
namespace {

constexpr int kLanes = 8;
constexpr int kRows = 6;

inline __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

#include "linear_panel.h"

}  // namespace

const LinearPanel kLinearAvx2 = panel_rows;

}  // namespace tdsf
