// SPDX-License-Identifier: Apache-2.0
//
// AVX-VNNI, of hosts that have VNNI without AVX-512: dot products by vpdpbusd. Layout: narrow.h.
//
// vpdpbusd multiplies unsigned bytes by signed ones and adds the four products of each 32-bit lane to
// its sum. Up to 4 query rows use the levels of two vectors; at 8 bits up to 2, which have two sums.
//
// Roofline. A 32-byte vector of 4-bit levels is 16 bytes from memory and costs 3 instructions to
// unpack, then about 1.5 per query row. At 4.5 instructions a cycle and 3.3 GHz a core would take
// 16 / (3 + 1.5 rows) * 15 GB/s of codes: 40 at 2 rows, 20 at 6.
#include <immintrin.h>

#include <type_traits>

#include "tdsf.h"

namespace tdsf {
namespace {

constexpr int most_rows(int bits) { return bits == 8 ? 2 : 4; }

#include "narrow.h"

// The digits' sums as one: the first digit counts `unit` of the second.
template <int kDigits>
inline __m256i joined(const __m256i* sum, int unit) {
  if (kDigits == 1) return sum[0];
  return _mm256_add_epi32(_mm256_mullo_epi32(sum[0], _mm256_set1_epi32(unit)), sum[kDigits - 1]);
}

template <int kBits, int kRows>
inline void score_rows(GroupCodes codes, const int8_t* levels, int dim, const QueryRows& q,
                       const float* scales, const Ahead& ahead, float* scores) {
  constexpr int kDigits = digits_of(kBits);
  for (int half = 0; half < 2; half++) {
    __m256i sum[kRows][2][kDigits] = {};
    for (int g = 0; g < dim / kLevelGroup; g++) {
      if (half == 0) touch(ahead, g);
      const __m256i table = flip_signs(level_table<kBits>(levels, g));
      const Square square = key_square<kBits>(codes, dim, half, g);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m256i level[2];
        for (int part = 0; part < 2; part++) level[part] = unpack<kBits>(square, part, j, table);
        for (int r = 0; r < kRows; r++)
          for (int digit = 0; digit < kDigits; digit++) {
            const __m256i four = broadcast4(q.digits[r].at[digit] + g * kLevelGroup + 4 * j);
            for (int part = 0; part < 2; part++)
              sum[r][part][digit] =
                  _mm256_dpbusd_avx_epi32(sum[r][part][digit], level[part], four);
          }
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int part = 0; part < 2; part++) {
        const int lanes = half * 16 + part * 8;
        const __m256i all = _mm256_sub_epi32(joined<kDigits>(sum[r][part], kQueryDigit),
                                             _mm256_set1_epi32(q.offsets[r]));
        save(scores + r * kPiece + lanes,
             _mm256_cvtepi32_ps(all) * load(scales + lanes) * q.unit[r]);
      }
  }
}

template <int kBits, int kRows>
inline void add_rows(GroupCodes codes, const int8_t* levels, int dim, const uint8_t* weights,
                     const float* units, const Ahead& ahead, float* acc) {
  constexpr int kDigits = digits_of(kBits);
  for (int g = 0; g < dim / kLevelGroup; g++) {
    touch(ahead, g);
    const __m256i table = level_table<kBits>(levels, g);
    __m256i sum[kRows][2][kDigits] = {};
    for (int half = 0; half < 2; half++) {
      const Square square = value_square<kBits>(codes, dim, half, g);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m256i level[2];
        for (int part = 0; part < 2; part++) {
          level[part] = unpack<kBits>(square, part, j, table);
          if (kBits == 8) level[part] = flip_signs(level[part]);
        }
        for (int r = 0; r < kRows; r++)
          for (int digit = 0; digit < kDigits; digit++) {
            const __m256i four =
                broadcast4(weights + (2 * r + digit) * kPiece + half * 16 + 4 * j);
            for (int part = 0; part < 2; part++)
              sum[r][part][digit] =
                  _mm256_dpbusd_avx_epi32(sum[r][part][digit], four, level[part]);
          }
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int part = 0; part < 2; part++) {
        float* to = acc + r * dim + g * kLevelGroup + part * 8;
        const __m256i all = joined<kDigits>(sum[r][part], kWeightDigit);
        save(to, load(to) + _mm256_cvtepi32_ps(all) * units[r * (kPiece / kGroup)]);
      }
  }
}

#include "attend.h"

}  // namespace

const Kernels kAvxVnni = {"avx_vnni", store_tokens, load_queries, attend_piece, merge, finish};

}  // namespace tdsf
