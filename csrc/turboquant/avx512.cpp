// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 without VNNI (Skylake servers): dot products by the unsigned-by-signed byte multiply-add.
// Layout: wide.h.
//
// As in avx2.cpp, the four vectors of a square are multiplied (vpmaddubsw) and added 16 bits wide, and
// only then widened (vpmaddwd, vpaddd); why nothing overflows stands there.
//
// Roofline. A vector of 4-bit levels is 32 bytes from memory and costs 1.5 instructions to unpack,
// then about 2.5 per query row. At two a cycle and 2.5 GHz a core takes 32 / (1.5 + 2.5 rows) * 5 GB/s
// of codes: 25 at 2 rows, 10 at 6. Two cores shared 14 where this was measured: memory bounds 2 rows,
// arithmetic 6.
#include <immintrin.h>

#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

#include "wide.h"

// sum += product, 16 bits wide. The compiler may not regroup such sums, or it keeps all products.
inline void add_in_order(__m512i& sum, __m512i product) {
  sum = _mm512_add_epi16(sum, product);
  asm("" : "+v"(sum));
}

inline __m512i widen(__m512i sum, __m512i halves) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(halves, _mm512_set1_epi16(1)));
}

inline void add_key_products(__m512i* sum, const __m512i* first, const __m512i* second,
                             const QueryDigits& query, int digit, int g) {
  __m512i a = broadcast4(query.lane_offsets[digit] + g), b = a;
  for (int j = 0; j < 4; j++) {
    const __m512i x = broadcast4(query.at[digit] + g * kLevelGroup + 4 * j);
    add_in_order(a, _mm512_maddubs_epi16(first[j], x));
    add_in_order(b, _mm512_maddubs_epi16(second[j], x));
  }
  sum[0] = widen(sum[0], a);
  sum[1] = widen(sum[1], b);
}

// Nothing: lane_offsets took the 128s out.
inline __m512i key_sum(__m512i sum, int32_t) { return sum; }

inline void add_value_products(__m512i& sum, const __m512i* level, const uint8_t* weights) {
  __m512i narrow = _mm512_maddubs_epi16(broadcast4(weights), level[0]);
  for (int j = 1; j < 4; j++)
    add_in_order(narrow, _mm512_maddubs_epi16(broadcast4(weights + 4 * j), level[j]));
  sum = widen(sum, narrow);
}

}  // namespace

const Kernels kAvx512 = {"avx512", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
