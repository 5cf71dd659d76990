// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 with VNNI: dot products by vpdpbusd. Layout: wide.h.
//
// vpdpbusd multiplies unsigned bytes by signed ones and adds the four products of each 32-bit lane to
// its sum, in one instruction and without the 16-bit step.
//
// Roofline. A vector of 4-bit levels is 32 bytes from memory and takes one vpdpbusd, so one cycle, per
// query row: 118 / rows GB/s of codes for a core at 3.7 GHz, 20 at 6 rows. Two cores shared 31 where
// this was written, so memory bounds decode up to 7 rows, as far as the softmax and the two products
// with a head's matrices (2 dim^2 multiply-adds a row) leave it.
#include <immintrin.h>

#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

#include "wide.h"

inline void add_key_products(__m512i* sum, const __m512i* first, const __m512i* second,
                             const QueryDigits& query, int digit, int g) {
  for (int j = 0; j < 4; j++) {
    const __m512i x = broadcast4(query.at[digit] + g * kLevelGroup + 4 * j);
    sum[0] = _mm512_dpbusd_epi32(sum[0], first[j], x);
    sum[1] = _mm512_dpbusd_epi32(sum[1], second[j], x);
  }
}

inline __m512i key_sum(__m512i sum, int32_t offset) {
  return _mm512_sub_epi32(sum, _mm512_set1_epi32(offset));
}

inline void add_value_products(__m512i& sum, const __m512i* level, const uint8_t* weights) {
  for (int j = 0; j < 4; j++)
    sum = _mm512_dpbusd_epi32(sum, broadcast4(weights + 4 * j), level[j]);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512_vnni", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
